//! The seccomp allow list and deny list of system calls.

/// Allow list: what ordinary programs use.
#[rustfmt::skip]
pub(super) const ALLOWED: &[i64] = &[
    // files and directories
    libc::SYS_read, libc::SYS_write, libc::SYS_readv, libc::SYS_writev, libc::SYS_pread64, libc::SYS_pwrite64,
    libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2, libc::SYS_openat, libc::SYS_openat2,
    libc::SYS_close, libc::SYS_close_range, libc::SYS_lseek, libc::SYS_fstat, libc::SYS_newfstatat, libc::SYS_statx,
    libc::SYS_statfs, libc::SYS_fstatfs, libc::SYS_getdents64, libc::SYS_getcwd, libc::SYS_chdir, libc::SYS_fchdir,
    libc::SYS_chroot, libc::SYS_mkdirat, libc::SYS_unlinkat, libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_linkat,
    libc::SYS_symlinkat, libc::SYS_readlinkat, libc::SYS_mknodat, libc::SYS_fchmod, libc::SYS_fchmodat, SYS_FCHMODAT2,
    libc::SYS_fchown, libc::SYS_fchownat, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_utimensat,
    libc::SYS_truncate, libc::SYS_ftruncate, libc::SYS_fallocate, libc::SYS_fadvise64, libc::SYS_readahead,
    libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_sync, libc::SYS_syncfs, libc::SYS_sync_file_range, libc::SYS_umask,
    libc::SYS_flock, libc::SYS_fcntl, libc::SYS_ioctl, libc::SYS_dup, libc::SYS_dup3, libc::SYS_sendfile,
    libc::SYS_copy_file_range, libc::SYS_splice, libc::SYS_tee, libc::SYS_vmsplice, libc::SYS_pipe2,
    libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr, libc::SYS_lgetxattr,
    libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr, libc::SYS_removexattr,
    libc::SYS_lremovexattr, libc::SYS_fremovexattr, libc::SYS_inotify_init1, libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch, libc::SYS_memfd_create,
    // waiting (not io_setup: the machine has a fixed number of AIO contexts, for all sandboxes)
    libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2, libc::SYS_eventfd2, libc::SYS_signalfd4, libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime,
    // memory
    libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mremap, libc::SYS_mprotect, libc::SYS_msync, libc::SYS_mincore,
    libc::SYS_madvise, libc::SYS_process_madvise, libc::SYS_brk, libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock,
    libc::SYS_mlockall, libc::SYS_munlockall, libc::SYS_membarrier, libc::SYS_pkey_mprotect, libc::SYS_pkey_alloc,
    libc::SYS_pkey_free, libc::SYS_get_mempolicy, libc::SYS_set_mempolicy, libc::SYS_mbind,
    // processes and threads (clone: see the refused flags)
    libc::SYS_clone, libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group, libc::SYS_wait4,
    libc::SYS_waitid, libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_getpid, libc::SYS_getppid,
    libc::SYS_gettid, libc::SYS_set_tid_address, libc::SYS_set_robust_list, libc::SYS_get_robust_list, libc::SYS_rseq,
    libc::SYS_futex, libc::SYS_futex_waitv, libc::SYS_sched_yield, libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity, libc::SYS_sched_getparam, libc::SYS_sched_setparam, libc::SYS_sched_getscheduler,
    libc::SYS_sched_setscheduler, libc::SYS_sched_getattr, libc::SYS_sched_setattr, libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min, libc::SYS_sched_rr_get_interval, libc::SYS_getpriority, libc::SYS_setpriority,
    libc::SYS_ioprio_get, libc::SYS_ioprio_set, libc::SYS_getcpu, libc::SYS_prctl, libc::SYS_personality,
    libc::SYS_setsid, libc::SYS_getsid, libc::SYS_setpgid, libc::SYS_getpgid, libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal, libc::SYS_pidfd_getfd, libc::SYS_kcmp, libc::SYS_ptrace, libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev, libc::SYS_prlimit64, libc::SYS_getrlimit, libc::SYS_setrlimit, libc::SYS_getrusage,
    libc::SYS_times, libc::SYS_restart_syscall, libc::SYS_seccomp, libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self, libc::SYS_capget, libc::SYS_capset,
    // users
    libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid, libc::SYS_getegid, libc::SYS_setuid, libc::SYS_setgid,
    libc::SYS_setreuid, libc::SYS_setregid, libc::SYS_setresuid, libc::SYS_getresuid, libc::SYS_setresgid,
    libc::SYS_getresgid, libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_getgroups, libc::SYS_setgroups,
    // signals
    libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend, libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack,
    // time
    libc::SYS_clock_gettime, libc::SYS_clock_getres, libc::SYS_clock_nanosleep, libc::SYS_nanosleep,
    libc::SYS_gettimeofday, libc::SYS_getitimer, libc::SYS_setitimer, libc::SYS_timer_create, libc::SYS_timer_settime,
    libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete,
    // sockets (socket: see the refused families)
    libc::SYS_socket, libc::SYS_socketpair, libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4,
    libc::SYS_connect, libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_sendto, libc::SYS_recvfrom,
    libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_recvmmsg, libc::SYS_setsockopt,
    libc::SYS_getsockopt, libc::SYS_shutdown,
    // System V and POSIX IPC, in the sandbox's own IPC namespace
    libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmdt, libc::SYS_shmctl, libc::SYS_semget, libc::SYS_semop,
    libc::SYS_semtimedop, libc::SYS_semctl, libc::SYS_msgget, libc::SYS_msgsnd, libc::SYS_msgrcv, libc::SYS_msgctl,
    libc::SYS_mq_open, libc::SYS_mq_unlink, libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
    // the machine
    libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom,
    // calls of this architecture only
    #[cfg(target_arch = "x86_64")] libc::SYS_arch_prctl,
    #[cfg(target_arch = "x86_64")] libc::SYS_open, #[cfg(target_arch = "x86_64")] libc::SYS_creat,
    #[cfg(target_arch = "x86_64")] libc::SYS_stat, #[cfg(target_arch = "x86_64")] libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")] libc::SYS_access, #[cfg(target_arch = "x86_64")] libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")] libc::SYS_dup2, #[cfg(target_arch = "x86_64")] libc::SYS_poll,
    #[cfg(target_arch = "x86_64")] libc::SYS_select, #[cfg(target_arch = "x86_64")] libc::SYS_epoll_create,
    #[cfg(target_arch = "x86_64")] libc::SYS_epoll_wait, #[cfg(target_arch = "x86_64")] libc::SYS_eventfd,
    #[cfg(target_arch = "x86_64")] libc::SYS_signalfd, #[cfg(target_arch = "x86_64")] libc::SYS_inotify_init,
    #[cfg(target_arch = "x86_64")] libc::SYS_mkdir, #[cfg(target_arch = "x86_64")] libc::SYS_rmdir,
    #[cfg(target_arch = "x86_64")] libc::SYS_unlink, #[cfg(target_arch = "x86_64")] libc::SYS_rename,
    #[cfg(target_arch = "x86_64")] libc::SYS_link, #[cfg(target_arch = "x86_64")] libc::SYS_symlink,
    #[cfg(target_arch = "x86_64")] libc::SYS_readlink, #[cfg(target_arch = "x86_64")] libc::SYS_mknod,
    #[cfg(target_arch = "x86_64")] libc::SYS_chmod, #[cfg(target_arch = "x86_64")] libc::SYS_chown,
    #[cfg(target_arch = "x86_64")] libc::SYS_lchown, #[cfg(target_arch = "x86_64")] libc::SYS_utime,
    #[cfg(target_arch = "x86_64")] libc::SYS_utimes, #[cfg(target_arch = "x86_64")] libc::SYS_futimesat,
    #[cfg(target_arch = "x86_64")] libc::SYS_getdents, #[cfg(target_arch = "x86_64")] libc::SYS_fork,
    #[cfg(target_arch = "x86_64")] libc::SYS_vfork, #[cfg(target_arch = "x86_64")] libc::SYS_getpgrp,
    #[cfg(target_arch = "x86_64")] libc::SYS_alarm, #[cfg(target_arch = "x86_64")] libc::SYS_pause,
    #[cfg(target_arch = "x86_64")] libc::SYS_time,
];

/// Deny list (EPERM): calls that change or read the machine, the kernel or other namespaces.
#[rustfmt::skip]
pub(super) const REFUSED: &[i64] = &[
    // mounts and namespaces
    libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_move_mount, libc::SYS_open_tree,
    libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick, libc::SYS_mount_setattr,
    libc::SYS_unshare, libc::SYS_setns,
    // the kernel itself
    libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load,
    #[cfg(target_arch = "x86_64")] libc::SYS_kexec_file_load, libc::SYS_reboot, libc::SYS_bpf,
    libc::SYS_perf_event_open, libc::SYS_userfaultfd, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register, libc::SYS_syslog, libc::SYS_acct, libc::SYS_swapon, libc::SYS_swapoff,
    libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_nfsservctl, libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")] libc::SYS_iopl, #[cfg(target_arch = "x86_64")] libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")] libc::SYS_modify_ldt, libc::SYS_memfd_secret, libc::SYS_lookup_dcookie,
    // the machine's clock and name
    libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_clock_adjtime, libc::SYS_adjtimex,
    libc::SYS_sethostname, libc::SYS_setdomainname,
    // keys, file handles, and pages of other processes
    libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl, libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at, libc::SYS_fanotify_init, libc::SYS_fanotify_mark, libc::SYS_move_pages,
    libc::SYS_migrate_pages,
];

/// Defined here because libc does not have it on every target yet.
const SYS_FCHMODAT2: i64 = 452;

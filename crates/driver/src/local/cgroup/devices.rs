//! Device access of a group: an allow list of harmless character devices.
//!
//! A sandbox has no node of any other device and cannot make one. This also holds should it get one:
//! v1 has the devices controller, v2 an eBPF program of type `CGROUP_DEVICE`.

use super::{Join, TASKS};
use crate::DriverError;
use crate::local::sys::{self, BpfInstruction};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

/// A character device: its major number, and its minor number (none: any).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    major: u32,
    minor: Option<u32>,
}

/// null, zero, full, random, urandom, tty, ptmx, and PTYs.
const SAFE: [Device; 8] = [
    Device::new(1, 3),
    Device::new(1, 5),
    Device::new(1, 7),
    Device::new(1, 8),
    Device::new(1, 9),
    Device::new(5, 0),
    Device::new(5, 2),
    Device {
        major: 136,
        minor: None,
    },
];

/// What gVisor's KVM platform needs.
pub(crate) const KVM: Device = Device::new(10, 232);

/// Handles that are needed to restrict a group, opened while the host's file system is visible.
#[derive(Debug)]
pub(crate) enum DeviceAccess {
    /// v1: the group's files.
    V1 {
        deny: File,
        allow: File,
        tasks: File,
    },
    /// v2: the group's directory.
    V2(OwnedFd),
    /// v1 without the controller.
    Unlimited,
}

// === impl Device ===

impl Device {
    const fn new(major: u32, minor: u32) -> Self {
        Self {
            major,
            minor: Some(minor),
        }
    }

    /// A rule of the v1 controller: read and write, no mknod.
    fn rule(self) -> String {
        match self.minor {
            Some(minor) => format!("c {}:{minor} rw", self.major),
            None => format!("c {}:* rw", self.major),
        }
    }
}

// === impl Join ===

impl Join {
    /// Opens what [`DeviceAccess::restrict`] needs later.
    pub(crate) fn devices(&self) -> Result<DeviceAccess, DriverError> {
        match self {
            Self::Write(groups) => match &groups.devices {
                Some(dir) => Ok(DeviceAccess::V1 {
                    deny: open(dir, "devices.deny")?,
                    allow: open(dir, "devices.allow")?,
                    tasks: open(dir, TASKS)?,
                }),
                None => Ok(DeviceAccess::Unlimited),
            },
            Self::CloneInto(dir) => {
                let step = DriverError::step("open", dir.display().to_string());
                Ok(DeviceAccess::V2(File::open(dir).map_err(step)?.into()))
            }
        }
    }
}

fn open(dir: &Path, name: &str) -> Result<File, DriverError> {
    let path = dir.join(name);
    let opened = File::options().write(true).open(&path);
    opened.map_err(DriverError::step("open", path.display().to_string()))
}

// === impl DeviceAccess ===

impl DeviceAccess {
    /// From here on the calling process, which must have one thread, and its children can open
    /// the safe devices and `more`.
    pub(crate) fn restrict(self, more: &[Device]) -> Result<(), DriverError> {
        let devices = || SAFE.iter().chain(more);
        let restricted = match self {
            Self::V1 { deny, allow, tasks } => restrict_v1(deny, allow, tasks, devices()),
            Self::V2(group) => {
                let program = program(devices());
                match sys::attach_device_program(group.as_fd(), &program) {
                    // A kernel without eBPF for control groups.
                    Err(error)
                        if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) =>
                    {
                        Ok(())
                    }
                    done => done,
                }
            }
            Self::Unlimited => Ok(()),
        };
        restricted.map_err(DriverError::step("restrict", "the sandbox's devices"))
    }
}

fn restrict_v1<'a>(
    mut deny: File,
    mut allow: File,
    mut tasks: File,
    devices: impl Iterator<Item = &'a Device>,
) -> io::Result<()> {
    deny.write_all(b"a")?;
    for device in devices {
        // The kernel takes one rule per write.
        allow.write_all(device.rule().as_bytes())?;
    }
    tasks.write_all(b"0")
}

/// Offsets in `struct bpf_cgroup_dev_ctx`: type and access in one word, and the device numbers.
const ACCESS_OFFSET: i16 = 0;
const MAJOR_OFFSET: i16 = 4;
const MINOR_OFFSET: i16 = 8;

/// In that word: a character device, and mknod.
const KIND_MASK: i32 = 0xffff;
const KIND_CHARACTER: i32 = 2;
const ACCESS_MAKE: i32 = 1 << 16;

/// Registers: the result, the context, and the fields read from it.
const ANSWER: u8 = 0;
const CONTEXT: u8 = 1;
const ACCESS: u8 = 2;
const MAJOR: u8 = 3;
const MINOR: u8 = 4;
const KIND: u8 = 5;

/// An eBPF program that returns 1 (allow) for these devices, and 0 for all others.
fn program<'a>(devices: impl Iterator<Item = &'a Device>) -> Vec<BpfInstruction> {
    use BpfInstruction as I;
    let number = |number: u32| i32::try_from(number).expect("device numbers have 20 bits");
    let mut program = vec![
        I::load_word(ACCESS, CONTEXT, ACCESS_OFFSET),
        I::load_word(MAJOR, CONTEXT, MAJOR_OFFSET),
        I::load_word(MINOR, CONTEXT, MINOR_OFFSET),
        I::copy(KIND, ACCESS),
        I::and(KIND, KIND_MASK),
        I::skip_if_equal(KIND, KIND_CHARACTER, 2),
        I::set(ANSWER, 0),
        I::exit(),
        I::and(ACCESS, ACCESS_MAKE),
        I::skip_if_equal(ACCESS, 0, 2),
        I::set(ANSWER, 0),
        I::exit(),
    ];
    for device in devices {
        match device.minor {
            Some(minor) => program.extend([
                I::skip_unless_equal(MAJOR, number(device.major), 3),
                I::skip_unless_equal(MINOR, number(minor), 2),
            ]),
            None => program.push(I::skip_unless_equal(MAJOR, number(device.major), 2)),
        }
        program.extend([I::set(ANSWER, 1), I::exit()]);
    }
    program.extend([I::set(ANSWER, 0), I::exit()]);
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::process::Command;

    /// Opens devices in a process of the group `dir`, which is restricted first.
    fn opened(dir: &Path, join: &Join, more: &[Device]) -> String {
        std::fs::create_dir(dir).expect("this test makes a control group: run it as root");
        let sh = "for d in null zero full random urandom ptmx loop-control kvm; do \
                  if [ -e /dev/$d ] && (: < /dev/$d) 2>/dev/null; then echo $d; fi; done; rm -f /tmp/k8e-node-$$; \
                  mknod /tmp/k8e-node-$$ c 1 3 2>/dev/null && { echo made; rm /tmp/k8e-node-$$; }; true";
        let access = join.devices().unwrap();
        if let DeviceAccess::V2(_) = access {
            // No process is cloned into it: the shell joins by itself.
            access.restrict(more).unwrap();
            let enter = format!("echo 0 > {}/cgroup.procs; {sh}", dir.display());
            let out = Command::new("sh").args(["-c", &enter]).output().unwrap();
            std::fs::remove_dir(dir).unwrap();
            return String::from_utf8(out.stdout).unwrap();
        }
        // A thread joins, and its child with it.
        let out = std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                access.restrict(more).unwrap();
                Command::new("sh").args(["-c", sh]).output().unwrap()
            });
            inside.join().unwrap()
        });
        std::fs::remove_dir(dir).unwrap();
        String::from_utf8(out.stdout).unwrap()
    }

    const ALL: &str = "null\nzero\nfull\nrandom\nurandom\nptmx\n";

    #[test]
    fn only_safe_devices_open() {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let root = |kind: &str, option: &str| {
            let found = mounts.lines().find_map(|line| {
                let fields: Vec<_> = line.split(' ').collect();
                let is = fields[2] == kind && fields[3].split(',').any(|has| has == option);
                is.then(|| PathBuf::from(fields[1]))
            });
            found.map(|root| root.join(format!("k8e-devices-{}", std::process::id())))
        };
        let v1 = root("cgroup", "devices");
        let v2 = root("cgroup2", "rw");
        assert!(
            v1.is_some() || v2.is_some(),
            "no control groups: mount them"
        );
        if let Some(dir) = v1 {
            let join = Join::Write(super::super::Groups {
                memory: PathBuf::new(),
                first: Vec::new(),
                devices: Some(dir.clone()),
                blkio: None,
            });
            assert_eq!(opened(&dir, &join, &[]), ALL);
            let more = [Device::new(10, 237)];
            assert_eq!(opened(&dir, &join, &more), format!("{ALL}loop-control\n"));
        }
        if let Some(dir) = v2 {
            let join = Join::CloneInto(dir.clone());
            assert_eq!(opened(&dir, &join, &[]), ALL);
            let more = [Device::new(10, 237)];
            assert_eq!(opened(&dir, &join, &more), format!("{ALL}loop-control\n"));
        }
    }
}

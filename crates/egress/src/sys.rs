//! System calls without a safe wrapper in rustix or socket2, each behind a safe function.
#![expect(
    unsafe_code,
    reason = "IP_RECVORIGDSTADDR and the control message that comes with it"
)]

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

/// Size of the buffer for control messages, in 64-bit words: more than `IP_ORIGDSTADDR` needs.
const CONTROL_WORDS: usize = 16;

/// Moves the calling thread, and no other, into a new network namespace.
pub(crate) fn new_namespace() -> io::Result<()> {
    use rustix::thread::UnshareFlags;
    // SAFETY: NEWNET leaves descriptors and memory as they are.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?)
}

/// Sets `IP_RECVORIGDSTADDR`: each datagram comes with its original destination.
pub(crate) fn tell_original_destination(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    let size = libc::socklen_t::try_from(size_of_val(&on)).map_err(io::Error::other)?;
    // SAFETY: the option's value is an int that lives until the call returns.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_IP,
            libc::IP_RECVORIGDSTADDR,
            std::ptr::from_ref(&on).cast(),
            size,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Receives one datagram and discards it; returns its original destination, if the kernel gave one.
pub(crate) fn original_destination(socket: &impl AsFd) -> io::Result<Option<SocketAddrV4>> {
    // Aligned for the headers in it.
    let mut control = [0_u64; CONTROL_WORDS];
    // SAFETY: msghdr is plain data for which all zeroes is valid: no name, no buffers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: message points to control, which outlives the call, and says its size.
    let length = unsafe { libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT) };
    if length < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written well-formed headers into control and set the length.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: a header that FIRSTHDR or NXTHDR returned lies whole in control.
        let (level, kind) = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
        if (level, kind) == (libc::SOL_IP, libc::IP_ORIGDSTADDR) {
            // SAFETY: with this kind the kernel puts a sockaddr_in behind the header; it may not be aligned.
            let address: libc::sockaddr_in =
                unsafe { std::ptr::read_unaligned(libc::CMSG_DATA(header).cast()) };
            let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
            return Ok(Some(SocketAddrV4::new(ip, u16::from_be(address.sin_port))));
        }
        // SAFETY: as above: message and header are those that the kernel filled.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(None)
}

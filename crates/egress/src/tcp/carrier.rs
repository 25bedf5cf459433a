//! What bytes ride in from one socket to the other.
//!
//! It is memory. `splice` through a pipe spares the copies and was slower in every measurement that
//! decided this: the copies go through a cache that is warm, and the pages of a pipe do not.

use std::io;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Most connections carry less than this in all.
const SMALL_BYTES: usize = 16 * 1024;

/// After so many bytes a connection carries bulk.
const BULK_AFTER_BYTES: usize = 128 * 1024;

/// For bulk: fewer turns, and what was read is still in the cache when it is written.
const LARGE_BYTES: usize = 1024 * 1024;

/// Large ones of all sandboxes together. More connections than this are not each faster for it.
const LARGE_MAX: usize = 32;

/// For bulk when there are no large ones left.
const MEDIUM_BYTES: usize = 64 * 1024;

static LARGE: Semaphore = Semaphore::const_new(LARGE_MAX);

/// One direction's. Silence costs no memory: it has none before the first byte.
#[derive(Default)]
pub(super) struct Carrier {
    buffer: Vec<u8>,
    carried: usize,
    large: Option<SemaphorePermit<'static>>,
}

// === impl Carrier ===

impl Carrier {
    /// Takes what there is, at least a byte; 0 at the end. What was loaded is to be unloaded first.
    pub(super) async fn load(&mut self, from: &TcpStream) -> io::Result<usize> {
        loop {
            from.readable().await?;
            self.grow();
            match from.try_read(&mut self.buffer) {
                Ok(bytes) => {
                    self.carried = self.carried.saturating_add(bytes);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The first `bytes` of it, which were loaded.
    pub(super) fn loaded(&self, bytes: usize) -> &[u8] {
        self.buffer.get(..bytes).unwrap_or_default()
    }

    fn grow(&mut self) {
        if self.buffer.is_empty() {
            self.buffer = vec![0; SMALL_BYTES];
        } else if self.carried >= BULK_AFTER_BYTES && self.buffer.len() == SMALL_BYTES {
            self.large = LARGE.try_acquire().ok();
            let bytes = if self.large.is_some() { LARGE_BYTES } else { MEDIUM_BYTES };
            #[cfg(test)]
            let bytes = std::env::var("K").map_or(bytes, |s| s.parse().unwrap());
            self.buffer = vec![0; bytes];
        }
    }
}

#[cfg(test)]
mod bench {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Instant;
    const TOTAL: usize = 200 << 20;
    fn sender() -> std::net::SocketAddr {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = l.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut s, _)) = l.accept() {
                let buf = vec![7u8; 256 << 10];
                for _ in 0..TOTAL / buf.len() { if s.write_all(&buf).is_err() { break; } }
            }
        });
        a
    }
    fn receive(a: std::net::SocketAddr) -> f64 {
        let t = Instant::now();
        let mut s = TcpStream::connect(a).unwrap();
        let mut buf = vec![0u8; 256 << 10];
        let mut n = 0;
        loop { let r = s.read(&mut buf).unwrap(); if r == 0 { break; } n += r; }
        assert_eq!(n, TOTAL);
        t.elapsed().as_secs_f64() * 1000.0
    }
    fn web() -> std::net::SocketAddr {
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = l.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut s, _)) = l.accept() {
                let mut head = [0; 4096];
                let _ = s.read(&mut head).unwrap();
                s.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {TOTAL}\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
                let buf = vec![7u8; 256 << 10];
                for _ in 0..TOTAL / buf.len() { if s.write_all(&buf).is_err() { break; } }
            }
        });
        a
    }
    fn get(a: std::net::SocketAddr) -> f64 {
        let t = Instant::now();
        let mut s = TcpStream::connect(a).unwrap();
        s.write_all(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n").unwrap();
        let mut buf = vec![0u8; 256 << 10];
        let mut n = 0;
        loop { let r = s.read(&mut buf).unwrap(); if r == 0 { break; } n += r; }
        assert!(n > TOTAL);
        t.elapsed().as_secs_f64() * 1000.0
    }
    #[test]
    #[ignore = "by hand"]
    fn http_speed() {
        use crate::tcp::testing::*;
        let up = web();
        let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let stage = rt.block_on(async move { let s = Stage::open(policy(&["a.example"], &[]), "93.184.215.14:80", up).await; s.tell("a.example", "93.184.215.14"); s });
        let gate = stage.gate;
        let mut d = vec![]; let mut r = vec![];
        #[allow(unsafe_code, clippy::all)]
        let cpu = || unsafe { let mut t: libc::timespec = std::mem::zeroed(); libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t); t.tv_sec as f64 * 1e3 + t.tv_nsec as f64 / 1e6 };
        let mut dc = vec![]; let mut rc = vec![];
        for _ in 0..20 { let c = cpu(); d.push(get(up)); dc.push(cpu() - c); let c = cpu(); r.push(get(gate)); rc.push(cpu() - c); stage.tell("a.example", "93.184.215.14"); }
        dc.sort_by(f64::total_cmp); rc.sort_by(f64::total_cmp);
        println!("cpu direct min {:.0} med {:.0} | http min {:.0} med {:.0}", dc[0], dc[10], rc[0], rc[10]);
        d.sort_by(f64::total_cmp); r.sort_by(f64::total_cmp);
        println!("direct min {:.0} med {:.0} | http min {:.0} med {:.0} ms", d[0], d[10], r[0], r[10]);
    }
    #[test]
    #[ignore = "by hand"]
    fn connect_latency() {
        use crate::tcp::testing::*;
        let l = TcpListener::bind("127.0.0.1:0").unwrap();
        let up = l.local_addr().unwrap();
        std::thread::spawn(move || while let Ok((mut s, _)) = l.accept() { let mut b = [0; 4096]; let n = s.read(&mut b).unwrap(); s.write_all(&b[..n]).unwrap(); });
        let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        for (to, said) in [("93.184.215.14:443", hello("a.example")), ("93.184.215.14:22", vec![1; 100])] {
            let stage = rt.block_on(async move { let s = Stage::open(policy(&["a.example", "a.example:22"], &[]), to, up).await; s.tell("a.example", "93.184.215.14"); s });
            let one = |a| { let t = Instant::now(); let mut s = TcpStream::connect(a).unwrap(); s.write_all(&said).unwrap(); let mut b = [0; 4096]; let _ = s.read(&mut b).unwrap(); t.elapsed().as_secs_f64() * 1e6 };
            let mut d = vec![]; let mut r = vec![];
            for _ in 0..300 { d.push(one(up)); r.push(one(stage.gate)); }
            d.sort_by(f64::total_cmp); r.sort_by(f64::total_cmp);
            println!("{to} connect and first answer: direct med {:.0} us | gate med {:.0} us", d[150], r[150]);
        }
    }
    #[test]
    #[ignore = "by hand"]
    fn speed() {
        let up = sender();
        let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let gate = rt.block_on(async move {
            let l = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let a = l.local_addr().unwrap();
            tokio::spawn(async move {
                loop {
                    let (c, _) = l.accept().await.unwrap();
                    tokio::spawn(async move {
                        let u = tokio::net::TcpStream::connect(up).await.unwrap();
                        crate::tcp::relay::relay(crate::tcp::relay::Side{stream:&c,said:&[]}, crate::tcp::relay::Side{stream:&u,said:&[]}, None).await;
                    });
                }
            });
            a
        });
        let mut d = vec![]; let mut r = vec![];
        #[allow(unsafe_code, clippy::all)]
        let cpu = || unsafe { let mut t: libc::timespec = std::mem::zeroed(); libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t); t.tv_sec as f64 * 1e3 + t.tv_nsec as f64 / 1e6 };
        let mut dc = vec![]; let mut rc = vec![];
        for _ in 0..40 { let c = cpu(); d.push(receive(up)); dc.push(cpu() - c); let c = cpu(); r.push(receive(gate)); rc.push(cpu() - c); }
        dc.sort_by(f64::total_cmp); rc.sort_by(f64::total_cmp);
        println!("cpu direct min {:.0} med {:.0} | relay min {:.0} med {:.0}", dc[0], dc[20], rc[0], rc[20]);
        d.sort_by(f64::total_cmp); r.sort_by(f64::total_cmp);
        println!("direct min {:.0} med {:.0} | relay min {:.0} med {:.0} ms", d[0], d[20], r[0], r[20]);
    }
}

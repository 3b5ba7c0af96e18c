//! Length-prefixed messages over pipes: the length as a little-endian u32, then that number of bytes.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::time::Instant;

/// Writes one frame.
pub fn write(to: &mut impl Write, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(payload)?;
    to.flush()
}

/// Reads one frame of at most `bytes_max` bytes. The sender is not trusted, so memory is allocated only for
/// bytes that have arrived.
pub fn read(from: &mut impl Read, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "frame too long"));
    }
    let mut payload = Vec::new();
    from.take(length as u64).read_to_end(&mut payload)?;
    if payload.len() < length { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(payload) }
}

/// One end of a pipe. Its reads and writes fail with `TimedOut` after `deadline`.
pub struct DeadlinePipe<'a> {
    pub pipe: &'a File,
    pub deadline: Instant,
}

impl DeadlinePipe<'_> {
    /// Waits until the pipe is ready for `events`, the pipe is closed, or the deadline has passed.
    fn wait(&self, events: libc::c_short) -> io::Result<()> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left_ms = i32::try_from(left.as_millis()).unwrap_or(i32::MAX).saturating_add(1);
            let mut poll = libc::pollfd { fd: self.pipe.as_raw_fd(), events, revents: 0 };
            // SAFETY: one valid pollfd, which outlives the call.
            match unsafe { libc::poll(&mut poll, 1, left_ms) } {
                0 => continue,
                n if n > 0 => return Ok(()),
                _ => match io::Error::last_os_error() {
                    e if e.kind() == io::ErrorKind::Interrupted => continue,
                    e => return Err(e),
                },
            }
        }
    }
}

impl Read for DeadlinePipe<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(libc::POLLIN)?;
        (&*self.pipe).read(buffer)
    }
}

impl Write for DeadlinePipe<'_> {
    /// The pipe must be non-blocking, because a long write to a blocking pipe would exceed the deadline.
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        loop {
            self.wait(libc::POLLOUT)?;
            match (&*self.pipe).write(buffer) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                other => return other,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_and_a_bad_one_is_refused() {
        let mut bytes = Vec::new();
        write(&mut bytes, b"hello\0world").unwrap();
        write(&mut bytes, b"").unwrap();
        let mut from = bytes.as_slice();
        assert_eq!(read(&mut from, 11).unwrap(), b"hello\0world");
        assert_eq!(read(&mut from, 0).unwrap(), b"");
        assert_eq!(read(&mut from, 0).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(read(&mut bytes.as_slice(), 10).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read(&mut &bytes[..8], 11).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

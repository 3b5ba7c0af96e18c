//! `rloss report --follow`: the page of runs that go on, served to this machine's browser.
//!
//! Two paths are answered, both below a random token: the page, and what changes when the page would. No path opens a
//! file, and a request that is not addressed to this server by its own name is refused, so that no other site's page and no
//! other user's guess reads a run.

use crate::bad_input;
use crate::error::EXIT_DONE;
use crate::metrics::Console;
use crate::report::{page, state};
use crate::run::signals::Stop;
use anyhow::{Context, Result, anyhow};
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;
use tiny_http::{Header, Method, Request, Response, Server};

/// How often a stop is looked for.
const POLL: Duration = Duration::from_millis(200);

/// Serves the page of `runs` on `port` of this machine until a signal.
///
/// # Errors
/// [`crate::error::BadInput`] for runs that cannot be reported and for a port in use, which names another.
pub fn run(runs: &[PathBuf], port: u16) -> Result<u8> {
    page(runs, true)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| taken(port, &e))?;
    let address = listener.local_addr().context("the server's address")?;
    let server = Server::from_listener(listener, None).map_err(|e| anyhow!("starting the server: {e}"))?;
    let follower = Follower { runs, token: token()?, address, made: None };
    let stop = Stop::listen()?;
    let console = Console::plain();
    console.print(&format!("http://{address}/{}/", follower.token));
    console.print("open it in a browser on this machine; Ctrl-C ends");
    serve(&server, follower, &stop)?;
    Ok(EXIT_DONE)
}

fn serve(server: &Server, mut follower: Follower, stop: &Stop) -> Result<()> {
    while !stop.asked() {
        if let Some(request) = server.recv_timeout(POLL).context("waiting for a request")? {
            let response = follower.answer(&request);
            // A browser that is gone needs no answer.
            let _ = request.respond(response);
        }
    }
    Ok(())
}

/// Names a port that is free in place of `port`.
fn taken(port: u16, error: &std::io::Error) -> anyhow::Error {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let remedy =
        free.map_or("name another with --port".to_owned(), |free| format!("--port {} is free", free.port()));
    bad_input!("report --follow: port {port} cannot be had: {error}; {remedy}")
}

/// 128 random bits, in hexadecimal.
fn token() -> Result<String> {
    let mut bytes = [0u8; 16];
    let mut source = std::fs::File::open("/dev/urandom").context("random numbers for the address")?;
    source.read_exact(&mut bytes).context("random numbers for the address")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

struct Follower<'a> {
    runs: &'a [PathBuf],
    token: String,
    address: SocketAddr,
    /// The page last made, and the state it shows.
    made: Option<(String, String)>,
}

impl Follower<'_> {
    fn answer(&mut self, request: &Request) -> Response<std::io::Cursor<Vec<u8>>> {
        let refuse =
            |code: u16, what: &str| Response::from_string(format!("{what}\n")).with_status_code(code);
        let mut kind = "text/plain; charset=utf-8";
        let host = request.headers().iter().find(|header| header.field.equiv("Host"));
        let hosts = [self.address.to_string(), format!("localhost:{}", self.address.port())];
        let mut response =
            if !host.is_some_and(|header| hosts.iter().any(|host| header.value == host.as_str())) {
                refuse(403, "this server answers to its own name alone")
            } else if *request.method() != Method::Get {
                refuse(405, "GET alone is answered")
            } else if request.url() == format!("/{}/", self.token) {
                match self.page() {
                    Ok(page) => {
                        kind = "text/html; charset=utf-8";
                        Response::from_string(page)
                    }
                    // Half written at this moment, perhaps: the browser asks again.
                    Err(error) => refuse(503, &format!("{error:#}")),
                }
            } else if request.url() == format!("/{}/state", self.token) {
                Response::from_string(state(self.runs))
            } else {
                refuse(404, "there is nothing here")
            };
        for (name, value) in [
            ("Content-Type", kind),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
        ] {
            // Written here, so it is one.
            if let Ok(header) = Header::from_bytes(name, value) {
                response.add_header(header);
            }
        }
        response
    }

    /// The page as the runs are now, made once for each of their states.
    fn page(&mut self) -> Result<String> {
        let now = state(self.runs);
        if let Some((of, page)) = &self.made
            && *of == now
        {
            return Ok(page.clone());
        }
        let page = page(self.runs, true)?;
        self.made = Some((now, page.clone()));
        Ok(page)
    }
}

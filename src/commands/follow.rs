//! `rloss report --follow`: serves the page of live runs to this machine's browser.
//!
//! The server answers two paths, both under a random token: the page, and a digest that changes when the page
//! does. No path opens a file. A request with another host name is refused. So no page of another site, and
//! no other user without the token, can read a run.

use crate::bad_input;
use crate::http::{Handler, HttpLimits, HttpRequest, Peer, Refusal, Response, serve};
use crate::metrics::Console;
use crate::panics::lock;
use crate::report::{awaited, page, stages_under_way, state_digest};
use crate::run::signals::StopFlag;
use crate::user_key::random_bytes;
use anyhow::{Context, Result};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// Serves the page of `runs` on `port` of this machine until a signal. A run that has not begun is awaited.
///
/// # Errors
/// [`crate::error::BadInput`] when no page can be made from `runs`, or when the port is not available. The
/// message about the port names a free one.
pub fn run(runs: &[PathBuf], port: u16) -> Result<()> {
    page(runs, true)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|e| port_in_use_error(port, &e))?;
    let address = listener.local_addr().context("the server's address")?;
    let follower = Follower { runs, token: token()?, address, cache: Mutex::new(None) };
    let stop = StopFlag::listen()?;
    let console = Console::plain();
    console.print(&format!("http://{address}/{}/", follower.token));
    console.print("open it in a browser on this machine; Ctrl-C stops the server");
    for folder in awaited(runs) {
        console.print(&format!("waiting for a run in {}", folder.display()));
    }
    let limits = HttpLimits { connections_max: CONNECTIONS_MAX, body_bytes_max: 0, memory_bytes_max: 0 };
    serve(&listener, limits, &follower, &|| stop.is_requested())
}

/// Returns the error for a port in use, which names a free port.
fn port_in_use_error(port: u16, error: &std::io::Error) -> anyhow::Error {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let remedy =
        free.map_or("name another with --port".to_owned(), |free| format!("--port {} is free", free.port()));
    bad_input!("report --follow: port {port} is not available: {error}; {remedy}")
}

/// Returns 128 random bits in hexadecimal.
fn token() -> Result<String> {
    let bytes: [u8; 16] = random_bytes().context("random numbers for the address")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Maximum number of simultaneous connections.
const CONNECTIONS_MAX: usize = 64;

struct Follower<'a> {
    runs: &'a [PathBuf],
    token: String,
    address: SocketAddr,
    /// The digest of the runs' state, and the page that shows this state.
    cache: Mutex<Option<(String, Arc<str>)>>,
}

impl Handler for Follower<'_> {
    fn check_head(&self, _: &HttpRequest) -> Result<(), Response<'static>> {
        // The server takes no body.
        Ok(())
    }

    fn answer<'r>(&'r self, request: Result<&'r HttpRequest, Refusal>, _: Peer<'r>) -> Response<'r> {
        let request = match request {
            Ok(request) => request,
            Err(refusal) => return Response::text(refusal.status, &format!("{}\n", refusal.message)),
        };
        let hosts = [self.address.to_string(), format!("localhost:{}", self.address.port())];
        if !request.host.as_ref().is_some_and(|host| hosts.contains(host)) {
            Response::text("403 Forbidden", "this server answers only requests to its own address\n")
        } else if request.method != "GET" {
            Response::text("405 Method Not Allowed", "only GET is answered\n")
        } else if request.path == format!("/{}/", self.token) {
            match self.page() {
                Ok(body) => Response::whole("200 OK", "text/html; charset=utf-8", body),
                // A file may be half written now. The browser asks again.
                Err(error) => Response::text("503 Service Unavailable", &format!("{error:#}\n")),
            }
        } else if request.path == format!("/{}/state", self.token) {
            Response::text(
                "200 OK",
                &[vec![state_digest(self.runs)], stages_under_way(self.runs)].concat().join("\n"),
            )
        } else {
            Response::text("404 Not Found", "not found\n")
        }
    }
}

impl Follower<'_> {
    /// Returns the page of the runs' current state, from the cache if the state has not changed.
    fn page(&self) -> Result<Arc<str>> {
        let mut cache = lock(&self.cache);
        let now = state_digest(self.runs);
        if let Some((of, page)) = &*cache
            && *of == now
        {
            return Ok(page.clone());
        }
        let page: Arc<str> = page(self.runs, true)?.into();
        *cache = Some((now, page.clone()));
        Ok(page)
    }
}

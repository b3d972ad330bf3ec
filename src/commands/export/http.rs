// SPDX-License-Identifier: GPL-2.0-only
//! The HTTP server of `cohort export`: answers scrapes one after the other, and lets no client hold it up, whether that is
//! slow, silent or malicious. What it answers is not decided here.
//!
//! Nobody waits for a place: who comes is taken in, and who has been here longest gives way. What one client can make
//! this process keep is bounded: a header while it arrives, some bytes in the kernel, and a page that it shares with others.

use super::exposition::Format;
use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::task::{AbortHandle, LocalSet};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// A request's header has to be here so soon after the connection, or after the last answer.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection ends after this at the latest; scrapers open a new one.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// A request's header is this long at the most, in bytes.
const MOST_HEADER: usize = 16 << 10;
/// Connections at the same time; with one more the oldest ends.
const MOST_CONNECTIONS: usize = 1280;
/// Connections that the kernel takes before this program does: as many may come while a page is written. The kernel's own
/// limit may be lower.
const MOST_UNTAKEN: i32 = 4096;
/// What the kernel keeps of an answer that a client does not read; it takes twice of that for itself. It must have two packets
/// of the loopback device, of 64 KiB each: the first alone is acknowledged after 40 ms.
const SEND_BUFFER: usize = 64 << 10;
/// A client that reads a page so slowly that it was written anew so often meanwhile is let go, and the page with it.
const PAGES_KEPT: u64 = 8;
/// How soon a signal is noticed.
const ATTENTION_PERIOD: Duration = Duration::from_millis(100);

const START_PAGE: &str = "<!doctype html><title>cohort export</title>\
    <p>What the vCPUs of this host do, for Prometheus: <a href=\"/metrics\">metrics</a>\n";

/// What is served.
pub trait Metrics {
    /// All metrics as they are now.
    fn page(&mut self, format: Format) -> Result<Page>;

    /// Called from time to time, whether or not somebody asks.
    fn tick(&mut self);
}

/// All metrics as they were at one time. Clones share the text.
#[derive(Clone, Debug)]
pub struct Page {
    /// What is answered.
    pub text: Bytes,
    /// Grows from page to page; the same page has the same.
    pub number: u64,
}

/// A client, while it is served and a while longer.
struct Client {
    task: AbortHandle,
    /// The page that it got last, which it may still read.
    page: Rc<Cell<Option<u64>>>,
}

/// All clients, those who have been here longest first.
#[derive(Default)]
struct Clients(RefCell<VecDeque<Client>>);

impl Clients {
    /// Takes in one more. Where there are too many the oldest ends: most likely it is one that wants no answer.
    fn add(&self, client: Client) {
        let mut clients = self.0.borrow_mut();
        if clients.len() >= MOST_CONNECTIONS {
            clients.retain(|client| !client.task.is_finished());
        }
        if clients.len() >= MOST_CONNECTIONS
            && let Some(oldest) = clients.pop_front()
        {
            oldest.task.abort();
        }
        clients.push_back(client);
    }

    /// Ends those that still have a page of long before page `number`.
    fn end_slow_readers(&self, number: u64) {
        for client in self.0.borrow().iter() {
            let page = client.page.get();
            if page.is_some_and(|page| page + PAGES_KEPT <= number) {
                client.task.abort();
            }
        }
    }
}

struct Server<M> {
    metrics: RefCell<M>,
    clients: Clients,
}

/// Bounds what clients of `listener` can make the kernel keep.
pub fn bound_clients(listener: &TcpListener) -> io::Result<()> {
    let socket = SockRef::from(listener);
    // Its connections inherit both. What a client sends before it is answered is a header.
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.set_recv_buffer_size(MOST_HEADER)?;
    socket.listen(MOST_UNTAKEN)
}

/// Serves until `told_to_leave`.
///
/// # Errors
/// When this process cannot wait for sockets at all. What a single client does is its own trouble.
pub fn serve(
    listener: TcpListener,
    metrics: impl Metrics + 'static,
    tick_period: Duration,
    told_to_leave: &AtomicBool,
) -> Result<()> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the server cannot be set up")?;
    let server = Rc::new(Server {
        metrics: RefCell::new(metrics),
        clients: Clients::default(),
    });
    // One thread: what is read from the kernel is read by one at a time.
    LocalSet::new().block_on(&runtime, async {
        tokio::select! {
            result = accept(listener, &server) => result,
            () = tick(&server.metrics, tick_period) => Ok(()),
            () = leave(told_to_leave) => Ok(()),
        }
    })
}

async fn accept<M: Metrics + 'static>(listener: TcpListener, server: &Rc<Server<M>>) -> Result<()> {
    let listener =
        tokio::net::TcpListener::from_std(listener).context("nobody can be waited for")?;
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // The client has gone again, or files have run out, which passes.
                tracing::warn!("a connection cannot be accepted: {error}");
                sleep(ATTENTION_PERIOD).await;
                continue;
            }
        };
        let page = Rc::default();
        let answer = answer(stream, Rc::clone(server), Rc::clone(&page));
        let task = tokio::task::spawn_local(async move {
            if let Ok(Err(error)) = timeout(CONNECTION_TIMEOUT, answer).await {
                tracing::debug!("a client was not answered to its end: {error}");
            }
        });
        let task = task.abort_handle();
        server.clients.add(Client { task, page });
    }
}

/// `page` is told which page the client gets.
async fn answer<M: Metrics + 'static>(
    stream: TcpStream,
    server: Rc<Server<M>>,
    page: Rc<Cell<Option<u64>>>,
) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = response(&request, &server, &page);
        async move { Ok::<_, Infallible>(response) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MOST_HEADER)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

fn response<M: Metrics>(
    request: &Request<Incoming>,
    server: &Server<M>,
    client_page: &Cell<Option<u64>>,
) -> Response<Full<Bytes>> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        let allowed = hyper::header::HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return response;
    }
    match request.uri().path() {
        "/metrics" => {
            let accept = request.headers().get(ACCEPT);
            let format = Format::accepted_by(accept.and_then(|accept| accept.to_str().ok()));
            match server.metrics.borrow_mut().page(format) {
                Ok(page) => {
                    client_page.set(Some(page.number));
                    server.clients.end_slow_readers(page.number);
                    with_type(StatusCode::OK, format.content_type(), page.text)
                }
                Err(error) => {
                    tracing::error!("{error:#}");
                    plain(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error:#}\n"))
                }
            }
        }
        "/" => with_type(StatusCode::OK, "text/html; charset=utf-8", START_PAGE),
        _ => plain(
            StatusCode::NOT_FOUND,
            "not found; metrics are at /metrics\n",
        ),
    }
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    with_type(status, "text/plain; charset=utf-8", text.to_owned())
}

fn with_type(
    status: StatusCode,
    content_type: &'static str,
    text: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    let content_type = hyper::header::HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

async fn tick(metrics: &RefCell<impl Metrics>, period: Duration) {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        metrics.borrow_mut().tick();
    }
}

async fn leave(told_to_leave: &AtomicBool) {
    while !told_to_leave.load(Ordering::Relaxed) {
        sleep(ATTENTION_PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{ErrorKind, Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::Arc;
    use std::thread::{self, JoinHandle};
    use std::time::Instant;

    /// Serves how often it was asked, and then some spaces.
    struct Asked {
        times: u64,
        spaces: usize,
    }

    impl Metrics for Asked {
        fn page(&mut self, _format: Format) -> Result<Page> {
            self.times += 1;
            anyhow::ensure!(self.times != 3, "the third cannot be read");
            let text = format!("asked {}\n{}", self.times, " ".repeat(self.spaces));
            Ok(Page {
                text: text.into(),
                number: self.times,
            })
        }

        fn tick(&mut self) {}
    }

    struct Running {
        address: SocketAddr,
        told_to_leave: Arc<AtomicBool>,
        thread: Option<JoinHandle<Result<()>>>,
    }

    impl Running {
        fn start() -> Self {
            Self::with_spaces(0)
        }

        fn with_spaces(spaces: usize) -> Self {
            crate::process::limits::raise_open_files().expect("everybody may up to the hard limit");
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            bound_clients(&listener).expect("a socket");
            listener.set_nonblocking(true).expect("a socket");
            let address = listener.local_addr().expect("it is bound");
            let told_to_leave = Arc::new(AtomicBool::new(false));
            let flag = Arc::clone(&told_to_leave);
            let period = Duration::from_secs(60);
            let thread =
                thread::spawn(move || serve(listener, Asked { times: 0, spaces }, period, &flag));
            Self {
                address,
                told_to_leave,
                thread: Some(thread),
            }
        }

        fn connect(&self) -> TcpStream {
            let stream = TcpStream::connect(self.address).expect("it listens");
            let patience = Some(2 * HEADER_TIMEOUT);
            stream.set_read_timeout(patience).expect("a duration");
            stream
        }

        /// What it answers to this first line.
        fn ask(&self, line: &str) -> String {
            let mut stream = self.connect();
            let request = format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).expect("it reads");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).expect("it answers");
            answer
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            self.told_to_leave.store(true, Ordering::Relaxed);
            let thread = self.thread.take().expect("it is dropped once");
            thread.join().expect("no panic").expect("it served");
        }
    }

    #[test]
    fn each_path_and_method_has_its_answer_and_an_error_ends_nothing() {
        let server = Running::start();
        assert!(server.ask("GET /metrics").ends_with("\r\n\r\nasked 1\n"));
        assert!(server.ask("HEAD /metrics").starts_with("HTTP/1.1 200"));
        let failed = server.ask("GET /metrics");
        assert!(failed.starts_with("HTTP/1.1 500") && failed.contains("third"));
        assert!(server.ask("GET /metrics").ends_with("asked 4\n"));
        assert!(server.ask("GET /").contains("/metrics"));
        assert!(server.ask("GET /else").starts_with("HTTP/1.1 404"));
        let refused = server.ask("DELETE /metrics");
        assert!(refused.starts_with("HTTP/1.1 405") && refused.contains("GET, HEAD"));
    }

    #[test]
    fn a_header_without_end_is_refused_long_before_its_end() {
        let server = Running::start();
        let mut stream = server.connect();
        let line = vec![b'x'; 1 << 20];
        let sent = stream
            .write_all(b"GET /metrics HTTP/1.1\r\nX: ")
            .and_then(|()| (0..10).try_for_each(|_| stream.write_all(&line)));
        // Either it closed the connection while this was sent, or it answers with an error.
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let refused = answer.starts_with(b"HTTP/1.1 431") || answer.starts_with(b"HTTP/1.1 400");
        assert!(sent.is_err() || read.is_err() || refused, "{answer:?}");
        assert!(server.ask("GET /metrics").contains("asked"));
    }

    #[test]
    fn silent_clients_are_let_go() {
        let server = Running::start();
        let mut silent = server.connect();
        silent.write_all(b"GET /metr").expect("it reads");
        let begin = Instant::now();
        let mut answer = Vec::new();
        let closed = silent.read_to_end(&mut answer);
        let still_open = closed.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        assert!(!still_open && !answer.starts_with(b"HTTP/1.1 200"));
        // Not because something else went wrong.
        assert!(begin.elapsed() > HEADER_TIMEOUT / 2);
    }

    /// How long it takes is measured by `make bench CASE=export`; a client that were not let in would wait for longer
    /// than this test's patience.
    #[test]
    fn a_thousand_slow_and_hostile_clients_keep_no_honest_one_from_its_answer() {
        let server = Running::with_spaces(1 << 20);
        let hostile: Vec<TcpStream> = (0..1000)
            .map(|number| {
                let mut stream = server.connect();
                let request: &[u8] = match number % 4 {
                    0 => b"",
                    1 => b"GET /metr",
                    2 => b"GET /metrics HTTP/1.1\r\nX: \0\xff",
                    // And never reads it.
                    _ => b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
                };
                // It may have been let go already.
                let _ = stream.write_all(request);
                stream
            })
            .collect();
        for _ in 0..5 {
            assert!(server.ask("GET /metrics").contains("asked"));
        }
        drop(hostile);
    }

    #[test]
    fn where_there_are_too_many_the_oldest_gives_way() {
        let server = Running::start();
        let mut clients: Vec<TcpStream> =
            (0..=MOST_CONNECTIONS).map(|_| server.connect()).collect();
        assert!(server.ask("GET /metrics").contains("asked"));
        let begin = Instant::now();
        let read = clients[0].read(&mut [0]);
        assert!(!read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
        assert!(
            begin.elapsed() < HEADER_TIMEOUT / 2,
            "it was let go for its silence"
        );
    }

    #[test]
    fn who_reads_too_slowly_is_let_go_with_the_page() {
        let server = Running::with_spaces(8 << 20);
        let mut slow = server.connect();
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        slow.write_all(request).expect("it reads");
        slow.read_exact(&mut [0; 100]).expect("it begins to answer");
        for _ in 0..=PAGES_KEPT {
            server.ask("HEAD /metrics");
        }
        let begin = Instant::now();
        let mut rest = Vec::new();
        // The kernel may say that the connection was reset.
        let _ = slow.read_to_end(&mut rest);
        assert!(rest.len() < 8 << 20, "it got all");
        assert!(
            begin.elapsed() < HEADER_TIMEOUT,
            "it was let go for something else"
        );
    }
}

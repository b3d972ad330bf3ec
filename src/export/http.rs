// SPDX-License-Identifier: GPL-2.0-only
//! The HTTP server of `cohort export`: answers scrapes one after the other, and lets no client hold it up, whether that is
//! slow, silent or malicious. What it answers is not decided here.

use super::exposition::Format;
use anyhow::{Context, Result};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::cell::RefCell;
use std::convert::Infallible;
use std::net::TcpListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::task::LocalSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// A request's header has to be here so soon after the connection, or after the last answer.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection ends after this at the latest; scrapers open a new one.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// A request's header is this long at the most, in bytes.
const MOST_HEADER: usize = 16 << 10;
/// Connections at the same time; more have to wait.
const MOST_CONNECTIONS: usize = 64;
/// How soon a signal is noticed.
const ATTENTION_PERIOD: Duration = Duration::from_millis(100);

const START_PAGE: &str = "<!doctype html><title>cohort export</title>\
    <p>What the vCPUs of this host do, for Prometheus: <a href=\"/metrics\">metrics</a>\n";

/// What is served.
pub trait Metrics {
    /// All metrics as they are now.
    fn page(&mut self, format: Format) -> Result<String>;

    /// Called from time to time, whether or not somebody asks.
    fn tick(&mut self);
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
    let metrics = Rc::new(RefCell::new(metrics));
    // One thread: what is read from the kernel is read by one at a time.
    LocalSet::new().block_on(&runtime, async {
        tokio::select! {
            result = accept(listener, Rc::clone(&metrics)) => result,
            () = tick(metrics, tick_period) => Ok(()),
            () = leave(told_to_leave) => Ok(()),
        }
    })
}

async fn accept<M: Metrics + 'static>(
    listener: TcpListener,
    metrics: Rc<RefCell<M>>,
) -> Result<()> {
    let listener =
        tokio::net::TcpListener::from_std(listener).context("nobody can be waited for")?;
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await;
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // The client has gone again, or files have run out, which passes.
                tracing::warn!("a connection cannot be accepted: {error}");
                sleep(ATTENTION_PERIOD).await;
                continue;
            }
        };
        let metrics = Rc::clone(&metrics);
        tokio::task::spawn_local(async move {
            let answered = timeout(CONNECTION_TIMEOUT, answer(stream, metrics)).await;
            if let Ok(Err(error)) = answered {
                tracing::debug!("a client was not answered to its end: {error}");
            }
            drop(place);
        });
    }
}

async fn answer<M: Metrics + 'static>(
    stream: TcpStream,
    metrics: Rc<RefCell<M>>,
) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = response(&request, &metrics);
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
    metrics: &RefCell<M>,
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
            match metrics.borrow_mut().page(format) {
                Ok(page) => with_type(StatusCode::OK, format.content_type(), page),
                Err(error) => {
                    tracing::error!("{error:#}");
                    plain(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error:#}\n"))
                }
            }
        }
        "/" => with_type(
            StatusCode::OK,
            "text/html; charset=utf-8",
            START_PAGE.into(),
        ),
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
    text: String,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    let content_type = hyper::header::HeaderValue::from_static(content_type);
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

async fn tick(metrics: Rc<RefCell<impl Metrics>>, period: Duration) {
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
    use std::thread::{self, JoinHandle};
    use std::time::Instant;

    /// Serves how often it was asked.
    struct Asked(u32);

    impl Metrics for Asked {
        fn page(&mut self, _format: Format) -> Result<String> {
            self.0 += 1;
            anyhow::ensure!(self.0 != 3, "the third cannot be read");
            Ok(format!("asked {}\n", self.0))
        }

        fn tick(&mut self) {}
    }

    struct Server {
        address: SocketAddr,
        told_to_leave: Arc<AtomicBool>,
        thread: Option<JoinHandle<Result<()>>>,
    }

    impl Server {
        fn start() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
            listener.set_nonblocking(true).expect("a socket");
            let address = listener.local_addr().expect("it is bound");
            let told_to_leave = Arc::new(AtomicBool::new(false));
            let flag = Arc::clone(&told_to_leave);
            let period = Duration::from_secs(60);
            let thread = thread::spawn(move || serve(listener, Asked(0), period, &flag));
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

    impl Drop for Server {
        fn drop(&mut self) {
            self.told_to_leave.store(true, Ordering::Relaxed);
            let thread = self.thread.take().expect("it is dropped once");
            thread.join().expect("no panic").expect("it served");
        }
    }

    #[test]
    fn each_path_and_method_has_its_answer_and_an_error_ends_nothing() {
        let server = Server::start();
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
        let server = Server::start();
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
    fn silent_clients_are_let_go_and_others_answered_meanwhile() {
        let server = Server::start();
        let begin = Instant::now();
        let mut silent: Vec<TcpStream> = (0..MOST_CONNECTIONS - 1)
            .map(|_| {
                let mut stream = server.connect();
                stream.write_all(b"GET /metr").expect("it reads");
                stream
            })
            .collect();
        assert!(server.ask("GET /metrics").contains("asked"));
        assert!(begin.elapsed() < HEADER_TIMEOUT, "others waited");
        // One more than there are places: it is answered when the silent ones are let go.
        silent.push(server.connect());
        assert!(server.ask("GET /metrics").contains("asked"));
        let mut answer = Vec::new();
        let closed = silent[0].read_to_end(&mut answer);
        let still_open = closed.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        assert!(!still_open && !answer.starts_with(b"HTTP/1.1 200"));
    }
}

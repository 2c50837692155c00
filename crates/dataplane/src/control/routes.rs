//! What can be asked of the control API, and the answers.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Bytes as Body, to_bytes};
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event as Message, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, put};
use axum::{Extension, Json, Router};
use futures_util::stream::{self, Stream};
use http_body_util::LengthLimitError;
use rtvirtio_spec::control::{
    AddDevice, AddIoThread, AddNetwork, AddNic, Decision, ErrorBody, Event, Handed, Lock,
    MoveQueue, Moved, PinIoThread, PolicyState, QueueDirection, Resize, Resized, ScheduleCurve,
    SetMapping, SetNicRate, SetPolicy, SetQos, Snapshot,
};
use rtvirtio_spec::mapping::Mapping;
use rtvirtio_spec::serve::{Fault, IoThread, MAX_CPU, Network, NicRate, Qos, Schedule, wire};
use rtvirtio_units::{DiskName, IoThreadName, Name, NameError, Nanos};
use serde::de::DeserializeOwned;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::connection::{Coming, Fds};
use super::{MAX_BODY, MAX_EVENT_READERS, REQUEST_TIME, metrics};
use crate::plane::{Admission, HandedFds, Plane, PlaneError};

/// How long a body may take, and a change once its request has been read: together less than
/// [`REQUEST_TIME`], so that whoever asks is told whether the change was begun.
const BODY_TIME: Duration = Duration::from_secs(4);
const CHANGE_TIME: Duration = Duration::from_secs(25);

/// How often a reader of events hears that the connection lives.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Clone)]
struct Api {
    plane: Arc<dyn Plane>,
    event_readers: Arc<Semaphore>,
    turns: Turns,
}

/// All routes.
pub(super) fn router(plane: Arc<dyn Plane>) -> Router {
    let event_readers = Arc::new(Semaphore::new(MAX_EVENT_READERS));
    let bounded = Router::new()
        .route("/v1/snapshot", get(snapshot))
        .route("/v1/configuration", get(configuration))
        .route("/v1/devices", get(devices).post(add_device))
        .route("/v1/devices/{device}", delete(remove_device).patch(resize_device))
        .route("/v1/devices/{device}/qos", put(set_qos).delete(remove_qos))
        .route("/v1/nics", get(nics).post(add_nic))
        .route("/v1/nics/{nic}", delete(remove_nic))
        .route("/v1/networks", get(networks).post(add_network))
        .route("/v1/networks/{network}", delete(remove_network))
        .route("/v1/nics/{nic}/{direction}", put(set_nic_rate).delete(remove_nic_rate))
        .route("/v1/schedules/{schedule}", put(set_schedule).delete(remove_schedule))
        .route("/v1/iothreads", get(iothreads).post(add_iothread))
        .route("/v1/iothreads/{iothread}", delete(remove_iothread))
        .route("/v1/iothreads/{iothread}/cpus", put(pin_iothread))
        .route("/v1/iothreads/{iothread}/lock", put(lock_iothread))
        .route("/v1/mapping/{device}", get(mapping).put(set_mapping))
        .route("/v1/mapping/{device}/{queue}", put(move_queue))
        .route("/v1/policy", get(policy).put(set_policy))
        .route("/v1/decisions", get(decisions))
        .route("/metrics", get(metrics_text))
        .layer(middleware::from_fn(in_time));
    bounded
        .route("/v1/events", get(events))
        .fallback(|| async { Failure::new(StatusCode::NOT_FOUND, "there is no such path") })
        .method_not_allowed_fallback(|| async {
            Failure::new(StatusCode::METHOD_NOT_ALLOWED, "the path does not have this method")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Api { plane, event_readers, turns: Turns::default() })
}

/// An answer that is an error.
struct Failure {
    status: StatusCode,
    body: ErrorBody,
}

impl Failure {
    fn new(status: StatusCode, error: impl ToString) -> Self {
        Self { status, body: ErrorBody { error: error.to_string(), hint: None } }
    }

    fn wrong(error: impl ToString) -> Self {
        Self::new(StatusCode::BAD_REQUEST, error)
    }
}

impl From<PlaneError> for Failure {
    fn from(error: PlaneError) -> Self {
        let status = match &error {
            PlaneError::NoDevice(_)
            | PlaneError::NoNic(_)
            | PlaneError::NoNetwork(_)
            | PlaneError::NoIoThread(_)
            | PlaneError::NoSchedule(_)
            | PlaneError::NoQueue { .. } => StatusCode::NOT_FOUND,
            PlaneError::DeviceExists(_)
            | PlaneError::IoThreadExists(_)
            | PlaneError::NetworkExists(_)
            | PlaneError::NetworkInUse { .. }
            | PlaneError::SocketInUse { .. }
            | PlaneError::IoThreadInUse { .. }
            | PlaneError::LastIoThread(_)
            | PlaneError::ScheduleInUse { .. }
            | PlaneError::QueueBusy { .. }
            | PlaneError::NotAdmitted { .. }
            | PlaneError::Shrinks { .. }
            | PlaneError::TooMany { .. }
            | PlaneError::Fault(Fault::NotKept(_)) => StatusCode::CONFLICT,
            PlaneError::Handed(_) => StatusCode::BAD_REQUEST,
            PlaneError::Fault(_) | PlaneError::Mapping(_) | PlaneError::Cpus { .. } => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            PlaneError::Io { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let text = match &error {
            PlaneError::Io { what, source } => {
                let first = Some(source as &dyn std::error::Error);
                let causes = std::iter::successors(first, |error| error.source());
                let mut text = what.clone();
                causes.for_each(|cause| text += &format!(": {cause}"));
                text
            }
            other => other.to_string(),
        };
        Self { status, body: ErrorBody { error: text, hint: error.hint() } }
    }
}

impl From<NameError> for Failure {
    fn from(error: NameError) -> Self {
        Self::wrong(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, Json(self.body)).into_response()
    }
}

/// What stands in a path, as [`Path`] has it, with an error like all others.
struct Segments<T>(T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Segments<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(segments)| Self(segments)).map_err(|error| Failure::wrong(error.body_text()))
    }
}

type Answer<T> = Result<Json<T>, Failure>;
type Done = Result<StatusCode, Failure>;

fn too_large() -> Failure {
    let text = format!("the body, of which {MAX_BODY} bytes are read at most");
    Failure::new(StatusCode::PAYLOAD_TOO_LARGE, text)
}

async fn in_time(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let said = head.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    if said.and_then(|length| length.parse().ok()).is_some_and(|length: usize| length > MAX_BODY) {
        return too_large().into_response();
    }
    let body = match tokio::time::timeout(BODY_TIME, to_bytes(body, MAX_BODY)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => {
            let source = std::error::Error::source(&error);
            let failure = match source.is_some_and(|source| source.is::<LengthLimitError>()) {
                true => too_large(),
                false => Failure::wrong(format!("the body: {error}")),
            };
            return failure.into_response();
        }
        Err(_) => {
            let text = "the body did not come in time; nothing was changed";
            return Failure::new(StatusCode::REQUEST_TIMEOUT, text).into_response();
        }
    };
    if let Some(coming) = head.extensions.get::<Coming>() {
        coming.has_come();
    }
    let request = Request::from_parts(head, body.into());
    match tokio::time::timeout(REQUEST_TIME - BODY_TIME, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            // Its change, if it has come to one, is given up with it unless it was begun.
            let text = "it takes too long; a change that was not begun is not made";
            Failure::new(StatusCode::GATEWAY_TIMEOUT, text).into_response()
        }
    }
}

/// A body, whatever its declared type.
fn parse<T: DeserializeOwned>(body: &Body) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|e| Failure::wrong(format!("the body: {e}")))
}

/// How a change stands whose time is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unfinished {
    /// It waited for others, and is not made any more.
    NotBegun,
    /// It goes on.
    Begun,
    /// It panicked.
    Failed,
}

/// A change that waits for its turn. Dropped before that comes (the time is up, or who asked has gone), it is not made,
/// and what was handed over for it is let go at once.
struct Claim<F>(Arc<Mutex<Option<F>>>);

/// Whoever takes a change makes it, or sees to it that nobody does.
fn take<F>(change: &Mutex<Option<F>>) -> Option<F> {
    change.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<F> Claim<F> {
    /// Whether the change has begun; if not, it never will.
    fn give_up(&self) -> bool {
        take(&self.0).is_none()
    }
}

impl<F> Drop for Claim<F> {
    fn drop(&mut self) {
        self.give_up();
    }
}

/// Whose turn it is. The changes of one device are made one after the other, and so are those that are of
/// no device. A disk that does not answer holds up its own changes alone.
#[derive(Clone, Default)]
struct Turns(Arc<Mutex<HashMap<Option<DiskName>, Weak<Turn>>>>);

type Turn = tokio::sync::Mutex<()>;

impl Turns {
    fn of(&self, device: Option<&DiskName>) -> Arc<Turn> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        if let Some(turn) = turns.get(&device.cloned()).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::new(Turn::default());
        turns.insert(device.cloned(), Arc::downgrade(&turn));
        turn
    }
}

/// What `change` returns, which runs on a thread of changes, after those of its turn that came before.
async fn in_turn<T: Send + 'static>(
    time: Duration,
    turn: Arc<Turn>,
    change: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Unfinished> {
    let claim = Claim(Arc::new(Mutex::new(Some(change))));
    let change = Arc::clone(&claim.0);
    let made = async move {
        let held = turn.lock_owned().await;
        let made = tokio::task::spawn_blocking(move || {
            let _held = held;
            take(&change).map(|change| change())
        });
        made.await
    };
    match tokio::time::timeout(time, made).await {
        Ok(Ok(Some(result))) => Ok(result),
        Ok(Ok(None)) => Err(Unfinished::NotBegun),
        Ok(Err(_)) => Err(Unfinished::Failed),
        Err(_) if claim.give_up() => Err(Unfinished::Begun),
        Err(_) => Err(Unfinished::NotBegun),
    }
}

impl Api {
    /// Makes a change of a device, or of none, in its turn and not on this thread.
    async fn change<T: Send + 'static>(
        self,
        device: Option<&DiskName>,
        change: impl FnOnce(&dyn Plane) -> Result<T, PlaneError> + Send + 'static,
    ) -> Result<T, Failure> {
        let late = |text| Failure::new(StatusCode::GATEWAY_TIMEOUT, text);
        match in_turn(CHANGE_TIME, self.turns.of(device), move || change(&*self.plane)).await {
            Ok(result) => Ok(result?),
            Err(Unfinished::NotBegun) => {
                Err(late("earlier changes take too long; this one was not begun, and will not be"))
            }
            Err(Unfinished::Begun) => {
                Err(late("the change takes too long; it was begun, and goes on"))
            }
            Err(Unfinished::Failed) => {
                Err(Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "the change failed"))
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.plane.observe().snapshot(Nanos::from(time))
    }
}

async fn snapshot(State(api): State<Api>) -> Json<Snapshot> {
    Json(api.snapshot())
}

async fn configuration(State(api): State<Api>) -> Json<wire::Configuration> {
    Json(wire::Configuration::from(&api.plane.configuration()))
}

async fn devices(State(api): State<Api>) -> Response {
    Json(api.snapshot().devices).into_response()
}

async fn iothreads(State(api): State<Api>) -> Response {
    Json(api.snapshot().iothreads).into_response()
}

/// The descriptors that came, by what the body says that they are for.
fn by_use(handed: &[Handed], fds: Fds, uses: &[Handed]) -> Result<HandedFds, Failure> {
    let fds = fds.take();
    if fds.len() != handed.len() {
        let text = format!("the body names {} descriptors, and {} came", handed.len(), fds.len());
        return Err(Failure::wrong(text));
    }
    let mut by_use = HandedFds::default();
    for (role, fd) in handed.iter().zip(fds) {
        if !uses.contains(role) {
            return Err(Failure::wrong("a descriptor is of no use here"));
        }
        let place = match role {
            Handed::Image => &mut by_use.image,
            Handed::Socket => &mut by_use.socket,
            Handed::Tap => {
                by_use.taps.push(fd);
                continue;
            }
        };
        if place.replace(fd).is_some() {
            return Err(Failure::wrong("two descriptors are for one use"));
        }
    }
    Ok(by_use)
}

async fn add_device(
    State(api): State<Api>,
    Extension(fds): Extension<Fds>,
    body: Body,
) -> Result<StatusCode, Failure> {
    let AddDevice { device, fds: handed } = parse(&body)?;
    let by_use = by_use(&handed, fds, &[Handed::Image, Handed::Socket])?;
    api.change(Some(&device.name.clone()), move |plane| plane.add_device(device, by_use)).await?;
    Ok(StatusCode::CREATED)
}

async fn remove_device(State(api): State<Api>, Segments(device): Segments<String>) -> Done {
    let device = DiskName::new(device)?;
    api.change(Some(&device.clone()), move |plane| plane.remove_device(&device)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn resize_device(
    State(api): State<Api>,
    Segments(device): Segments<String>,
    body: Body,
) -> Answer<Resized> {
    let device = DiskName::new(device)?;
    let Resize { size, shrink } = parse(&body)?;
    let size = size.map(|size| size.0);
    let capacity = api
        .change(Some(&device.clone()), move |plane| plane.resize_device(&device, size, shrink))
        .await?;
    Ok(Json(Resized { capacity }))
}

async fn set_qos(
    State(api): State<Api>,
    Segments(device): Segments<String>,
    uri: Uri,
    body: Body,
) -> Done {
    let admission = match uri.query() {
        None | Some("force=false") => Admission::Test,
        Some("force=true") => Admission::Forced,
        Some(_) => return Err(Failure::wrong("of a query there is force=true alone")),
    };
    let device = DiskName::new(device)?;
    let SetQos(raw) = parse(&body)?;
    let qos = Qos::new(raw).map_err(PlaneError::from)?;
    api.change(Some(&device.clone()), move |plane| plane.set_qos(&device, Some(qos), admission))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn remove_qos(State(api): State<Api>, Segments(device): Segments<String>) -> Done {
    let device = DiskName::new(device)?;
    api.change(Some(&device.clone()), move |plane| plane.set_qos(&device, None, Admission::Forced))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn nics(State(api): State<Api>) -> Response {
    Json(api.snapshot().nics).into_response()
}

async fn add_nic(
    State(api): State<Api>,
    Extension(fds): Extension<Fds>,
    body: Body,
) -> Result<StatusCode, Failure> {
    let AddNic { nic, fds: handed } = parse(&body)?;
    let by_use = by_use(&handed, fds, &[Handed::Socket, Handed::Tap])?;
    let device = DiskName::from(nic.name.clone());
    api.change(Some(&device), move |plane| plane.add_nic(nic, by_use)).await?;
    Ok(StatusCode::CREATED)
}

async fn remove_nic(State(api): State<Api>, Segments(nic): Segments<String>) -> Done {
    let nic = DiskName::new(nic)?;
    api.change(Some(&nic.clone()), move |plane| plane.remove_nic(&nic)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn networks(State(api): State<Api>) -> Response {
    Json(wire::Configuration::from(&api.plane.configuration()).network).into_response()
}

async fn add_network(State(api): State<Api>, body: Body) -> Result<StatusCode, Failure> {
    let AddNetwork(raw) = parse(&body)?;
    let network = Network::new(raw).map_err(PlaneError::from)?;
    api.change(None, move |plane| plane.add_network(network)).await?;
    Ok(StatusCode::CREATED)
}

async fn remove_network(State(api): State<Api>, Segments(network): Segments<String>) -> Done {
    let network = Name::new(network)?;
    api.change(None, move |plane| plane.remove_network(&network)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// `rx` or `tx`, as in a configuration.
fn direction(text: &str) -> Result<QueueDirection, Failure> {
    match text {
        "rx" => Ok(QueueDirection::Receive),
        "tx" => Ok(QueueDirection::Transmit),
        _ => Err(Failure::wrong("a direction is rx or tx")),
    }
}

async fn set_nic_rate(
    State(api): State<Api>,
    Segments((nic, way)): Segments<(String, String)>,
    body: Body,
) -> Done {
    let (nic, direction) = (DiskName::new(nic)?, direction(&way)?);
    let SetNicRate(raw) = parse(&body)?;
    let rate = NicRate::new(direction, raw).map_err(PlaneError::from)?;
    api.change(Some(&nic.clone()), move |plane| plane.set_nic_rate(&nic, direction, Some(rate)))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn remove_nic_rate(
    State(api): State<Api>,
    Segments((nic, way)): Segments<(String, String)>,
) -> Done {
    let (nic, direction) = (DiskName::new(nic)?, direction(&way)?);
    api.change(Some(&nic.clone()), move |plane| plane.set_nic_rate(&nic, direction, None)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn set_schedule(
    State(api): State<Api>,
    Segments(schedule): Segments<String>,
    body: Body,
) -> Done {
    let name = Name::new(schedule)?;
    let curve: ScheduleCurve = parse(&body)?;
    let schedule = Schedule::new(curve.named(name)).map_err(PlaneError::from)?;
    let is_new = api.change(None, move |plane| plane.set_schedule(schedule)).await?;
    Ok(if is_new { StatusCode::CREATED } else { StatusCode::NO_CONTENT })
}

async fn remove_schedule(State(api): State<Api>, Segments(schedule): Segments<String>) -> Done {
    let schedule = Name::new(schedule)?;
    api.change(None, move |plane| plane.remove_schedule(&schedule)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn add_iothread(State(api): State<Api>, body: Body) -> Done {
    let AddIoThread(raw) = parse(&body)?;
    let iothread = IoThread::new(raw).map_err(PlaneError::from)?;
    api.change(None, move |plane| plane.add_iothread(iothread)).await?;
    Ok(StatusCode::CREATED)
}

async fn remove_iothread(State(api): State<Api>, Segments(iothread): Segments<String>) -> Done {
    let iothread = IoThreadName::new(iothread)?;
    api.change(None, move |plane| plane.remove_iothread(&iothread)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn pin_iothread(
    State(api): State<Api>,
    Segments(iothread): Segments<String>,
    body: Body,
) -> Done {
    let iothread = IoThreadName::new(iothread)?;
    let PinIoThread { mut cpus } = parse(&body)?;
    if let Some(bad) = cpus.iter().find(|cpu| cpu.get() > MAX_CPU) {
        return Err(PlaneError::from(Fault::BadCpu(*bad)).into());
    }
    cpus.sort_unstable();
    cpus.dedup();
    api.change(None, move |plane| plane.pin_iothread(&iothread, &cpus)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn lock_iothread(
    State(api): State<Api>,
    Segments(iothread): Segments<String>,
    body: Body,
) -> Done {
    let iothread = IoThreadName::new(iothread)?;
    let Lock { locked } = parse(&body)?;
    api.change(None, move |plane| plane.lock_iothread(&iothread, locked)).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn entries(mapping: &Mapping) -> Json<SetMapping> {
    Json(SetMapping { mapping: mapping.entries() })
}

async fn mapping(State(api): State<Api>, Segments(device): Segments<String>) -> Answer<SetMapping> {
    let device = DiskName::new(device)?;
    Ok(entries(&api.plane.mapping(&device)?))
}

async fn set_mapping(
    State(api): State<Api>,
    Segments(device): Segments<String>,
    body: Body,
) -> Answer<SetMapping> {
    let device = DiskName::new(device)?;
    let SetMapping { mapping } = parse(&body)?;
    let turn = device.clone();
    let change = move |plane: &dyn Plane| {
        plane.set_mapping(&device, &mapping)?;
        plane.mapping(&device)
    };
    Ok(entries(&api.change(Some(&turn), change).await?))
}

async fn move_queue(
    State(api): State<Api>,
    Segments((device, queue)): Segments<(String, String)>,
    body: Body,
) -> Answer<Moved> {
    let device = DiskName::new(device)?;
    let queue = queue.parse().map_err(|_| Failure::wrong("a queue is a number"))?;
    let MoveQueue { iothread } = parse(&body)?;
    let pause = api
        .change(Some(&device.clone()), move |plane| plane.move_queue(&device, queue, &iothread))
        .await?;
    Ok(Json(Moved { pause_ns: pause }))
}

async fn policy(State(api): State<Api>) -> Json<PolicyState> {
    Json(api.plane.policy())
}

async fn set_policy(State(api): State<Api>, body: Body) -> Answer<PolicyState> {
    let SetPolicy(settings) = parse(&body)?;
    let change = move |plane: &dyn Plane| {
        plane.set_policy(settings)?;
        Ok(plane.policy())
    };
    Ok(Json(api.change(None, change).await?))
}

async fn decisions(State(api): State<Api>, uri: Uri) -> Answer<Vec<Decision>> {
    let after = match uri.query() {
        None => Some(0),
        Some(query) => query.strip_prefix("after=").and_then(|number| number.parse().ok()),
    };
    let wrong = || Failure::wrong("of a query there is after=NUMBER alone");
    Ok(Json(api.plane.decisions(after.ok_or_else(wrong)?)))
}

async fn metrics_text(State(api): State<Api>) -> Response {
    match metrics::text(api.plane.observe()) {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(e) => Failure::new(StatusCode::INTERNAL_SERVER_ERROR, e).into_response(),
    }
}

async fn events(
    State(api): State<Api>,
    Extension(coming): Extension<Coming>,
) -> Result<Sse<impl Stream<Item = Result<Message, Infallible>>>, Failure> {
    let place = api.event_readers.try_acquire_owned().map_err(|_| {
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "too many readers of events already")
    })?;
    coming.has_come();
    coming.goes_on();
    let receiver = api.plane.events();
    // First a comment: whoever has read it misses nothing that happens later.
    let first = Message::default().comment("ready");
    let state = (Some(first), receiver, place);
    let messages = stream::unfold(state, |(first, mut receiver, place)| async move {
        if let Some(first) = first {
            return Some((Ok(first), (None, receiver, place)));
        }
        let event = match receiver.recv().await {
            Ok(event) => event,
            Err(RecvError::Lagged(count)) => Event::EventsLost { count },
            Err(RecvError::Closed) => return None,
        };
        let place: OwnedSemaphorePermit = place;
        // Names and numbers are JSON.
        let message = Message::default().json_data(event).unwrap_or_default();
        Some((Ok(message), (None, receiver, place)))
    });
    Ok(Sse::new(messages).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::Relaxed;
    use std::sync::mpsc;

    use super::*;

    /// With one thread of changes, as the server has it.
    fn run<T>(work: impl Future<Output = T>) -> T {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().max_blocking_threads(1).build().unwrap();
        let done = runtime.block_on(work);
        // Whatever waits still for its turn has it.
        runtime.shutdown_timeout(Duration::from_secs(20));
        done
    }

    #[test]
    fn change_that_is_given_up_before_it_began_is_never_made() {
        let made = Arc::new(AtomicBool::new(false));
        let (release, held) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let handed = Arc::new(());
        let kept = Arc::downgrade(&handed);
        let second = {
            let made = Arc::clone(&made);
            move || {
                made.store(true, Relaxed);
                drop(handed);
            }
        };
        run(async move {
            let first = tokio::task::spawn_blocking(move || {
                begun.send(()).unwrap();
                held.recv().unwrap();
            });
            begins.recv().unwrap();
            let late = in_turn(Duration::from_millis(50), Arc::default(), second).await;
            assert_eq!(late, Err(Unfinished::NotBegun));
            // Though the thread has yet to come to it: a socket that nobody holds can be told from one that is served.
            assert!(kept.upgrade().is_none(), "what was handed over is kept");
            release.send(()).unwrap();
            first.await.unwrap();
            // A later one is made: the thread has passed the one that was given up.
            assert_eq!(in_turn(Duration::from_secs(20), Arc::default(), || 7).await, Ok(7));
        });
        assert!(!made.load(Relaxed));
    }

    #[test]
    fn change_whose_asker_goes_before_it_began_is_never_made() {
        let made = Arc::new(AtomicBool::new(false));
        let (release, held) = mpsc::channel::<()>();
        let third = Arc::clone(&made);
        run(async move {
            let (begun, begins) = mpsc::channel();
            let first = tokio::task::spawn_blocking(move || {
                begun.send(()).unwrap();
                held.recv().unwrap();
            });
            begins.recv().unwrap();
            let gone = in_turn(Duration::from_secs(20), Arc::default(), move || {
                third.store(true, Relaxed)
            });
            // The connection's end drops it.
            assert!(tokio::time::timeout(Duration::from_millis(50), gone).await.is_err());
            release.send(()).unwrap();
            first.await.unwrap();
            assert_eq!(in_turn(Duration::from_secs(20), Arc::default(), || ()).await, Ok(()));
        });
        assert!(!made.load(Relaxed));
    }

    #[test]
    fn change_that_was_begun_goes_on_and_says_so() {
        let made = Arc::new(AtomicBool::new(false));
        let (release, held) = mpsc::channel::<()>();
        let slow = Arc::clone(&made);
        run(async move {
            let late = in_turn(Duration::from_secs(2), Arc::default(), move || {
                held.recv().unwrap();
                slow.store(true, Relaxed);
            });
            assert_eq!(late.await, Err(Unfinished::Begun));
            release.send(()).unwrap();
        });
        assert!(made.load(Relaxed));
    }

    #[test]
    fn change_of_a_disk_that_does_not_answer_holds_up_its_own_device_alone() {
        let (release, held) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let turns = Turns::default();
        let name = |text: &str| DiskName::new(text).unwrap();
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().max_blocking_threads(4).build().unwrap();
        runtime.block_on(async move {
            let stuck = tokio::spawn(in_turn(
                Duration::from_secs(20),
                turns.of(Some(&name("stuck"))),
                move || {
                    begun.send(()).unwrap();
                    held.recv().unwrap();
                },
            ));
            while begins.try_recv().is_err() {
                tokio::task::yield_now().await;
            }
            let change = |device: Option<&DiskName>, ms| {
                in_turn(Duration::from_millis(ms), turns.of(device), || ())
            };
            assert_eq!(change(Some(&name("other")), 20_000).await, Ok(()));
            assert_eq!(change(None, 20_000).await, Ok(()));
            let own = change(Some(&name("stuck")), 50).await;
            assert_eq!(own, Err(Unfinished::NotBegun));
            release.send(()).unwrap();
            assert_eq!(stuck.await.unwrap(), Ok(()));
            assert_eq!(change(Some(&name("stuck")), 20_000).await, Ok(()));
            // No turn is kept that nobody waits for.
            let _last = turns.of(None);
            assert_eq!(turns.0.lock().unwrap().len(), 1);
        });
    }
}

//! What the reference is made of: JSON schemas of the files that an operator writes, and the control
//! API's routes (`docs/reference`, made by the system test `reference`).

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::control::{
    AddDevice, AddIoThread, AddNetwork, AddNic, Decision, DeviceState, ErrorBody, Event,
    IoThreadState, Lock, MoveQueue, Moved, NicState, PinIoThread, PolicyState, Resize, Resized,
    ScheduleCurve, SetMapping, SetNicRate, SetPolicy, SetQos, Snapshot,
};
use crate::serve::wire::{Configuration, Network};

/// The JSON schema of a specification.
#[must_use]
pub fn specification() -> Value {
    file(crate::specification::schema(SchemaGenerator::new(settings())))
}

/// The JSON schema of `rtvirtio serve`'s configuration.
#[must_use]
pub fn serve() -> Value {
    file(SchemaGenerator::new(settings()).into_root_schema_for::<Configuration>())
}

fn settings() -> SchemaSettings {
    SchemaSettings::draft2020_12()
}

fn file(schema: Schema) -> Value {
    let mut schema = schema.to_value();
    drop_null(&mut schema);
    schema
}

/// TOML has no null: a key that is optional is left out.
fn drop_null(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(drop_null),
        Value::Object(object) => {
            if let Some(Value::Array(types)) = object.get_mut("type") {
                types.retain(|name| name != "null");
                if let [only] = &types[..] {
                    let only = only.clone();
                    object.insert("type".to_owned(), only);
                }
            }
            if let Some(Value::Array(items)) = object.get_mut("anyOf") {
                items.retain(|item| *item != json!({ "type": "null" }));
                if let [Value::Object(only)] = &items[..] {
                    let only = only.clone();
                    object.remove("anyOf");
                    object.extend(only);
                }
            }
            if object.get("default") == Some(&Value::Null) {
                object.remove("default");
            }
            object.values_mut().for_each(drop_null);
        }
        _ => {}
    }
}

type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

/// A route of the control API.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Such as `get`.
    pub method: &'static str,
    /// With its parameters in braces.
    pub path: &'static str,
    /// What it does.
    pub summary: &'static str,
    /// Its query's key, and what that does.
    query: Option<(&'static str, &'static str)>,
    body: Option<SchemaOf>,
    /// Status, and what comes with it.
    answers: &'static [(u16, Content)],
}

#[derive(Debug, Clone, Copy)]
enum Content {
    None,
    Json(SchemaOf),
    /// Server-sent events, each of these.
    Events(SchemaOf),
    OpenMetrics,
}

use Content::{Events, Json, None as Nothing, OpenMetrics};

const fn route(
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    body: Option<SchemaOf>,
    answers: &'static [(u16, Content)],
) -> Route {
    Route { method, path, summary, query: None, body, answers }
}

const DONE: &[(u16, Content)] = &[(204, Nothing)];
const MADE: &[(u16, Content)] = &[(201, Nothing)];

/// All routes.
pub const ROUTES: &[Route] = &[
    route(
        "get",
        "/v1/snapshot",
        "Everything at one time: IOThreads, devices with their queues and latencies, network devices, schedules.",
        None,
        &[(200, Json(of::<Snapshot>))],
    ),
    route(
        "get",
        "/v1/configuration",
        "What is served now, as the configuration that would have it served after the next start.",
        None,
        &[(200, Json(of::<Configuration>))],
    ),
    route("get", "/v1/devices", "The devices.", None, &[(200, Json(of::<Vec<DeviceState>>))]),
    route(
        "post",
        "/v1/devices",
        "Adds a device. Descriptors that its image or socket is to be come with the request (SCM_RIGHTS).",
        Some(of::<AddDevice>),
        MADE,
    ),
    route(
        "delete",
        "/v1/devices/{device}",
        "Removes a device: its front end is disconnected once what is in flight has ended.",
        None,
        DONE,
    ),
    route(
        "patch",
        "/v1/devices/{device}",
        "Takes over the size that the file now has, or changes it, and tells the guest.",
        Some(of::<Resize>),
        &[(200, Json(of::<Resized>))],
    ),
    Route {
        query: Some(("force", "true: without the admission test")),
        ..route(
            "put",
            "/v1/devices/{device}/qos",
            "Has a device join a schedule, or changes what holds for it there. What admission finds not to fit is refused.",
            Some(of::<SetQos>),
            DONE,
        )
    },
    route(
        "delete",
        "/v1/devices/{device}/qos",
        "Has a device leave its schedule: its requests start as they come.",
        None,
        DONE,
    ),
    route("get", "/v1/nics", "The network devices.", None, &[(200, Json(of::<Vec<NicState>>))]),
    route(
        "post",
        "/v1/nics",
        "Adds a network device, to a network while frames flow there. Descriptors that its socket or its TAP's queues are to be \
         come with the request (SCM_RIGHTS); a TAP's have to.",
        Some(of::<AddNic>),
        MADE,
    ),
    route(
        "delete",
        "/v1/nics/{nic}",
        "Removes a network device: its front end is disconnected.",
        None,
        DONE,
    ),
    route("get", "/v1/networks", "The networks.", None, &[(200, Json(of::<Vec<Network>>))]),
    route("post", "/v1/networks", "Makes a network.", Some(of::<AddNetwork>), MADE),
    route(
        "delete",
        "/v1/networks/{network}",
        "Removes a network in which no device is.",
        None,
        DONE,
    ),
    route(
        "put",
        "/v1/nics/{nic}/{direction}",
        "Limits what goes to a network device's guest (rx) or comes from it (tx), and promises how long it waits, while frames flow. \
         A promise that an IOThread could not keep is refused, and nothing is changed.",
        Some(of::<SetNicRate>),
        DONE,
    ),
    route(
        "delete",
        "/v1/nics/{nic}/{direction}",
        "Takes limit and promise from a network device's direction.",
        None,
        DONE,
    ),
    route(
        "put",
        "/v1/schedules/{schedule}",
        "Makes the schedule of a physical device (201), or changes its service curve (204).",
        Some(of::<ScheduleCurve>),
        &[(201, Nothing), (204, Nothing)],
    ),
    route(
        "delete",
        "/v1/schedules/{schedule}",
        "Removes a schedule that no device is in.",
        None,
        DONE,
    ),
    route("get", "/v1/iothreads", "The IOThreads.", None, &[(200, Json(of::<Vec<IoThreadState>>))]),
    route("post", "/v1/iothreads", "Starts an IOThread.", Some(of::<AddIoThread>), MADE),
    route(
        "delete",
        "/v1/iothreads/{iothread}",
        "Ends an IOThread that serves no queue.",
        None,
        DONE,
    ),
    route(
        "put",
        "/v1/iothreads/{iothread}/cpus",
        "Pins an IOThread.",
        Some(of::<PinIoThread>),
        DONE,
    ),
    route(
        "put",
        "/v1/iothreads/{iothread}/lock",
        "Locks an IOThread: no policy gives it a queue or takes one away.",
        Some(of::<Lock>),
        DONE,
    ),
    route(
        "get",
        "/v1/mapping/{device}",
        "Which IOThread serves each queue of a device.",
        None,
        &[(200, Json(of::<SetMapping>))],
    ),
    route(
        "put",
        "/v1/mapping/{device}",
        "Moves the queues of a device, while it is in use, as QEMU's `iothread-vq-mapping` says.",
        Some(of::<SetMapping>),
        &[(200, Json(of::<SetMapping>))],
    ),
    route(
        "put",
        "/v1/mapping/{device}/{queue}",
        "Moves one queue to another IOThread.",
        Some(of::<MoveQueue>),
        &[(200, Json(of::<Moved>))],
    ),
    route(
        "get",
        "/v1/policy",
        "What decides how many IOThreads there are.",
        None,
        &[(200, Json(of::<PolicyState>))],
    ),
    route(
        "put",
        "/v1/policy",
        "Sets the policy. What is left out stays as it is.",
        Some(of::<SetPolicy>),
        &[(200, Json(of::<PolicyState>))],
    ),
    Route {
        query: Some(("after", "a number: the decisions with higher ones")),
        ..route(
            "get",
            "/v1/decisions",
            "The last 1,000 decisions of policies, and what came of each.",
            None,
            &[(200, Json(of::<Vec<Decision>>))],
        )
    },
    route(
        "get",
        "/v1/events",
        "What happens from now on, as server-sent events. A comment comes first: after it nothing is missed.",
        None,
        &[(200, Events(of::<Event>))],
    ),
    route("get", "/metrics", "All metrics, in seconds and bytes.", None, &[(200, OpenMetrics)]),
];

/// The control API as an OpenAPI 3.1 document.
#[must_use]
pub fn openapi() -> Value {
    let settings = settings().with(|s| s.definitions_path = "/components/schemas".into());
    let mut generator = SchemaGenerator::new(settings);
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = operation(route, &mut generator);
    }
    let error = generator.subschema_for::<ErrorBody>();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "rtvirtio serve: control API",
            "version": "1",
            "description": "HTTP/1.1 with JSON bodies on a Unix socket that root may use, and the configured group. \
                Fields whose names end in _ns are nanoseconds. A reader ignores fields that it does not know: \
                they are added without a new version. A body with an unknown key is refused."
        },
        "paths": paths,
        "components": {
            "schemas": generator.take_definitions(true),
            "responses": { "Error": {
                "description": "400: the request is not valid; 404: what it names is not there; 405: the path does not \
                    have this method; 408: the body did not come in time; 409: it does not fit what is there; 413: the body \
                    is too large; 422: what it asks for cannot be; 500: it failed; 503: there are too many readers of \
                    events; 504: it takes too long, and the text says whether it was begun.",
                "content": { "application/json": { "schema": error } }
            } }
        }
    })
}

fn operation(route: &Route, generator: &mut SchemaGenerator) -> Value {
    let mut parameters: Vec<Value> = route
        .path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
        .map(|name| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } }))
        .collect();
    parameters.extend(route.query.map(|(name, description)| {
        json!({ "name": name, "in": "query", "description": description, "schema": { "type": "string" } })
    }));
    let mut responses = Map::new();
    for (status, content) in route.answers {
        let mut response = json!({ "description": reason(*status) });
        let (kind, schema) = match content {
            Nothing => (None, json!({})),
            Json(of) => (Some("application/json"), of(generator).to_value()),
            Events(of) => (Some("text/event-stream"), of(generator).to_value()),
            OpenMetrics => {
                (Some("application/openmetrics-text; version=1.0.0"), json!({ "type": "string" }))
            }
        };
        if let Some(kind) = kind {
            response["content"] = json!({ kind: { "schema": schema } });
        }
        responses.insert(status.to_string(), response);
    }
    responses.insert("default".to_owned(), json!({ "$ref": "#/components/responses/Error" }));
    let mut operation = json!({ "summary": route.summary, "responses": responses });
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(body) = route.body {
        let schema = body(generator).to_value();
        operation["requestBody"] =
            json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    operation
}

const fn reason(status: u16) -> &'static str {
    match status {
        201 => "It is there.",
        204 => "It is done.",
        _ => "What was asked for.",
    }
}

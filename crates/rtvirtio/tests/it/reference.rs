//! The reference in `docs/reference` is what the types say. `UPDATE_REFERENCE=1` writes it anew. The page of
//! metrics is written by hand, and has the names that the sources have.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use rtvirtio_spec::reference::{ROUTES, openapi, serve, specification};
use serde_json::{Map, Value, json};

/// Compares a file of the reference with what it must be, or writes it.
fn check(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference").join(name);
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == text,
        "docs/reference/{name} is not what the types say: \
         UPDATE_REFERENCE=1 cargo test -p rtvirtio --test it reference"
    );
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap() + "\n"
}

#[test]
fn specification_is_current() {
    let schema = specification();
    check("specification.schema.json", &pretty(&schema));
    let text = format!(
        "# The specification\n\n{MADE}\n\nThis is what `rtvirtio plan` reads (TOML). `rtvirtio init` writes one from \
         the VMs that run. Editors complete and check it by its [JSON schema](specification.schema.json).\n\n{}",
        page(&schema)
    );
    check("specification.md", &text);
}

#[test]
fn configuration_of_serve_is_current() {
    let schema = serve();
    check("serve.schema.json", &pretty(&schema));
    let text = format!(
        "# The configuration of `rtvirtio serve`\n\n{MADE}\n\nThe file is TOML; its [JSON schema](serve.schema.json) is \
         for editors. [The data plane](../data-plane.md) says how to begin.\n\n{}",
        page(&schema)
    );
    check("serve.md", &text);
}

#[test]
fn control_api_is_current() {
    let api = openapi();
    check("control.openapi.json", &pretty(&api));
    check("control.md", &routes(&api));
}

#[test]
fn every_reference_within_a_document_leads_somewhere() {
    for document in [specification(), serve(), openapi()] {
        let mut references = BTreeSet::new();
        collect(&document, &mut references);
        assert!(!references.is_empty());
        for reference in references {
            let found = document.pointer(reference.strip_prefix('#').unwrap());
            assert!(found.is_some(), "{reference}");
        }
    }
}

fn collect(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect(item, into)),
        Value::Object(object) => {
            if let Some(Value::String(reference)) = object.get("$ref") {
                into.insert(reference.clone());
            }
            object.values().for_each(|value| collect(value, into));
        }
        _ => {}
    }
}

/// Names of metrics as they are exported, from the source of the data plane's.
fn data_plane_metrics(source: &str) -> BTreeSet<String> {
    let source = source.split_whitespace().collect::<Vec<_>>().join(" ").replace("( ", "(");
    let mut families = BTreeSet::new();
    // prometheus-client adds the unit, and to a counter what it is.
    for (call, unit, kind) in [
        ("counters(encoder, (\"", "", "_total"),
        ("gauges(encoder, (\"", "", ""),
        ("histograms(encoder, (\"", "_seconds", ""),
        // Such a tuple is a histogram's that is passed on.
        (" = (\"", "_seconds", ""),
    ] {
        for (at, _) in source.match_indices(call) {
            let rest = &source[at + call.len()..];
            let (name, rest) = rest.split_once('"').unwrap();
            let statement = rest.split([';', '}']).next().unwrap();
            let units = [("Seconds", "_seconds"), ("Bytes", "_bytes"), ("Ratios", "_ratios")];
            let named = units.iter().find(|(of, _)| statement.contains(&format!("Unit::{of}")));
            let unit = named.map_or(unit, |(_, suffix)| *suffix);
            families.insert(format!("rtvirtio_{name}{unit}{kind}"));
        }
    }
    families
}

/// The same of `watch --listen`, which writes them as they are.
fn watch_metrics(source: &str) -> BTreeSet<String> {
    let source = source.split_whitespace().collect::<Vec<_>>().join(" ").replace("( ", "(");
    let names = source.split("metric(\"").skip(1).filter_map(|rest| rest.split('"').next());
    names.map(|name| format!("rtvirtio_{name}")).collect()
}

#[test]
fn pages_name_the_metrics_that_there_are() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let served = data_plane_metrics(&read("crates/dataplane/src/control/metrics.rs"));
    let watched = watch_metrics(&read("crates/rtvirtio/src/verbs/watch/metrics.rs"));
    assert!(served.len() > 40 && watched.len() > 10, "{served:?} {watched:?}");
    let families: BTreeSet<String> = served.union(&watched).cloned().collect();

    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let named = |page: &str| -> BTreeSet<String> {
        let text = read(page);
        let starts = text.match_indices("rtvirtio_").map(|(at, _)| &text[at..]);
        starts.map(|rest| rest.split(|c| !is_part(c)).next().unwrap().to_owned()).collect()
    };
    assert_eq!(named("docs/metrics.md"), families);
    for page in ["docs/data-plane.md", "docs/operating.md", "README.md"] {
        let unknown: Vec<String> = named(page).difference(&families).cloned().collect();
        assert_eq!(unknown, [""; 0], "{page}");
    }
}

const MADE: &str =
    "<!-- Made from the types: UPDATE_REFERENCE=1 cargo test -p rtvirtio --test it reference -->";

/// The root's table, then those that it leads to, each once, in the order in which they are met.
fn page(root: &Value) -> String {
    let mut writer = Writer { text: String::new(), definitions: &root["$defs"], met: Vec::new() };
    writer.keys(root);
    writer.sections();
    writer.text
}

struct Writer<'a> {
    text: String,
    definitions: &'a Value,
    /// Definitions with a section, in the order in which they were met.
    met: Vec<String>,
}

impl Writer<'_> {
    fn sections(&mut self) {
        let mut written = 0;
        while let Some(name) = self.met.get(written).cloned() {
            written += 1;
            let schema = &self.definitions[&name];
            let (heading, said) = heading(&name, schema);
            write!(self.text, "\n## {heading}\n\n").unwrap();
            if !said.is_empty() {
                write!(self.text, "{said}\n\n").unwrap();
            }
            match schema["oneOf"].as_array() {
                Some(variants) => self.variants(variants),
                None => self.keys(schema),
            }
        }
    }

    /// What a tagged object may be.
    fn variants(&mut self, variants: &[Value]) {
        for variant in variants {
            let properties = || variant["properties"].as_object().into_iter().flatten();
            let tag = properties().find_map(|(key, v)| Some((key, v["const"].as_str()?)));
            let tag = tag.map(|(key, value)| format!("`{key}` = `{value}`: "));
            writeln!(self.text, "- {}{}", tag.unwrap_or_default(), description(variant)).unwrap();
            for (key, value) in properties().filter(|(_, value)| value.get("const").is_none()) {
                let kind = self.kind(value);
                writeln!(self.text, "  - `{key}`, {kind}: {}", description(value)).unwrap();
            }
        }
    }

    fn keys(&mut self, schema: &Value) {
        let Some(properties) = schema["properties"].as_object() else {
            let kind = self.kind(schema);
            writeln!(self.text, "{kind}").unwrap();
            return;
        };
        self.text.push_str("| Key | Value | |\n| --- | --- | --- |\n");
        self.rows(schema, properties);
    }

    fn rows(&mut self, schema: &Value, properties: &Map<String, Value>) {
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (key, value) in properties {
            let mut kind = self.kind(value);
            if required.contains(&key.as_str()) {
                kind += ", required";
            }
            let mut said = description(value);
            let leads_to = reference(value).map_or(value, |name| &self.definitions[name]);
            for (constant, meaning) in constants(leads_to).into_iter().flatten() {
                write!(said, " `{constant}`: {meaning}").unwrap();
            }
            writeln!(self.text, "| `{key}` | {} | {} |", cell(&kind), cell(&said)).unwrap();
        }
    }

    /// The type of a value, in words.
    fn kind(&mut self, value: &Value) -> String {
        if let Some(name) = reference(value) {
            let there = &self.definitions[name];
            if let Some(constants) = constants(there) {
                let names: Vec<String> = constants.iter().map(|(c, _)| format!("`{c}`")).collect();
                return names.join(", ");
            }
            if there.get("properties").is_none() && there.get("oneOf").is_none() {
                return self.kind(there);
            }
            if !self.met.iter().any(|met| met == name) {
                self.met.push(name.to_owned());
            }
            let (heading, _) = heading(name, there);
            return format!("[{heading}](#{})", anchor(&heading));
        }
        let either = value["oneOf"].as_array().or_else(|| value["anyOf"].as_array());
        if let Some(kinds) = either {
            let kinds = kinds.iter().filter(|kind| kind["type"] != "null");
            let kinds: Vec<String> = kinds.map(|kind| self.kind(kind)).collect();
            return kinds.join(" or ");
        }
        let of = match &value["type"] {
            Value::String(of) => of.as_str(),
            Value::Array(all) => {
                all.iter().filter_map(Value::as_str).find(|of| *of != "null").unwrap_or_default()
            }
            _ => "value",
        };
        match of {
            "integer" | "number" => of.to_owned() + &range(value),
            "array" => format!("array of {}", self.kind(&value["items"])),
            "object" => {
                let each = ["additionalProperties", "patternProperties"].map(|key| &value[key]);
                match each {
                    [Value::Object(each), _] => {
                        let each = self.kind(&Value::Object(each.clone()));
                        format!("by name, {each}")
                    }
                    [_, Value::Object(each)] => {
                        let each = each.values().next().map(|each| self.kind(each));
                        format!("by number, {}", each.unwrap_or_default())
                    }
                    _ => of.to_owned(),
                }
            }
            other => other.to_owned(),
        }
    }
}

fn range(value: &Value) -> String {
    match (value["minimum"].as_f64(), value["maximum"].as_f64()) {
        (Some(low), Some(high)) if low == high => format!(" {low}"),
        (Some(low), Some(high)) => format!(" {low} to {high}"),
        (Some(low), None) if low > 0.0 => format!(" from {low}"),
        _ => String::new(),
    }
}

/// A definition's heading, and what is said below. One that is a table is called as it is written.
fn heading(name: &str, schema: &Value) -> (String, String) {
    let said = schema["description"].as_str().unwrap_or_default();
    let code = said.strip_prefix('`').and_then(|rest| rest.split_once('`'));
    match code {
        Some((code, rest)) if !code.contains(" /") => {
            let rest = rest.trim_start_matches([':', '.', ',', ' ']);
            (format!("`{code}`"), capital(&plain(rest)))
        }
        _ => (name.to_owned(), plain(said)),
    }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn description(value: &Value) -> String {
    plain(value["description"].as_str().unwrap_or_default())
}

/// On one line, without rustdoc's links.
fn plain(text: &str) -> String {
    text.replace('\n', " ").replace("[`", "`").replace("`]", "`")
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().collect::<String>() + letters.as_str()
    })
}

/// The definition to which a value leads, with or without null beside it.
fn reference(value: &Value) -> Option<&str> {
    match value["$ref"].as_str() {
        Some(reference) => reference.rsplit('/').next(),
        None => value["anyOf"].as_array()?.iter().find_map(reference),
    }
}

/// The values of an enumeration, with what each means.
fn constants(value: &Value) -> Option<Vec<(&str, String)>> {
    let variants = value["oneOf"].as_array()?;
    variants.iter().map(|v| Some((v["const"].as_str()?, description(v)))).collect()
}

/// As mdBook and GitHub make them.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let letter = |c| match c {
        ' ' => Some('-'),
        c if char::is_alphanumeric(c) || c == '-' || c == '_' => Some(c),
        _ => None,
    };
    kept.chars().filter_map(letter).collect()
}

/// The routes, then what goes in and out.
fn routes(api: &Value) -> String {
    let definitions = &api["components"]["schemas"];
    let text = format!(
        "# The control API\n\n{MADE}\n\n{} An [OpenAPI 3.1 document](control.openapi.json) says the same.\n\n\
         ```sh\ncurl --unix-socket /run/rtvirtio/control.sock http://localhost/v1/snapshot\n```\n\n\
         | Route | | Body | Answer |\n| --- | --- | --- | --- |\n",
        api["info"]["description"].as_str().unwrap()
    );
    let mut writer = Writer { text, definitions, met: Vec::new() };
    for route in ROUTES {
        let operation = &api["paths"][route.path][route.method];
        let body = &operation["requestBody"]["content"]["application/json"]["schema"];
        let body = if body.is_null() { String::new() } else { writer.kind(body) };
        let mut answers = Vec::new();
        let responses = operation["responses"].as_object().unwrap().iter();
        for (status, answer) in responses.filter(|(status, _)| *status != "default") {
            let media = answer["content"].as_object().and_then(|all| all.values().next());
            answers.push(match media {
                Some(media) if media["schema"] == json!({ "type": "string" }) => {
                    format!("{status}, OpenMetrics text")
                }
                Some(media) => format!("{status}, {}", writer.kind(&media["schema"])),
                None => status.clone(),
            });
        }
        let mut summary = route.summary.to_owned();
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        for parameter in parameters.filter(|parameter| parameter["in"] == "query") {
            let (name, said) = (&parameter["name"], &parameter["description"]);
            let (name, said) = (name.as_str().unwrap(), said.as_str().unwrap());
            write!(summary, " `?{name}=`: {said}.").unwrap();
        }
        let (method, path) = (route.method.to_uppercase(), route.path);
        let row = [&summary, &body, &answers.join("; ")].map(|text| cell(text)).join(" | ");
        writeln!(writer.text, "| `{method} {path}` | {row} |").unwrap();
    }
    let error = api["components"]["responses"]["Error"]["description"].as_str().unwrap();
    let of_error = writer.kind(&json!({ "$ref": "#/components/schemas/ErrorBody" }));
    write!(writer.text, "\nAny other status comes with {of_error}. {error}\n").unwrap();
    writer.sections();
    writer.text
}

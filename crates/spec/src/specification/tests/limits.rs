//! Files that are made to cost much.

use super::*;

#[test]
fn file_larger_than_the_limit_is_refused_unparsed() {
    // 64 MiB of what would otherwise be a syntax error on its first byte.
    let text = "]".repeat(64 << 20);
    let error = refused(&text);
    assert_eq!(*error.problem, Problem::TooLarge { bytes: 67_108_864 });
    assert_eq!((error.line, error.column), (1, 1));
    // At the limit a file is read.
    let mut text = FULL.to_owned();
    text.push('#');
    text.push_str(&"x".repeat(MAX_FILE_BYTES - text.len()));
    assert_eq!(text.len(), 4_194_304);
    assert!(parse("s.toml", &text).is_ok());
    text.push('x');
    assert_eq!(problem(&text), Problem::TooLarge { bytes: 4_194_305 });
}

#[test]
fn nesting_deep_is_refused_without_overflow() {
    for (open, close) in [("[", "]"), ("{a=", "}")] {
        let closed = format!("x = {}1{}", open.repeat(100_000), close.repeat(100_000));
        assert!(matches!(problem(&closed), Problem::Toml { .. }));
        let error = refused(&format!("version = 1\nx = {}", open.repeat(100_000)));
        assert!(error.hint().contains("levels"), "{error}: {}", error.hint());
    }
    assert_eq!(problem(&format!("{}x = 1", "a.".repeat(100_000))), Problem::KeyTooDeep);
    assert_eq!(problem(&format!("[{}x]", "a.".repeat(100_000))), Problem::KeyTooDeep);
    assert_eq!(problem("a.b.c.d.e.f.g.h.i = 1"), Problem::KeyTooDeep);
    assert!(matches!(problem("a.b.c.d.e.f.g.h = 1"), Problem::UnknownKey { .. }));
}

/// The TOML parser bounds brackets and the parts of a key, not their product.
#[test]
fn nesting_of_dotted_keys_in_tables_does_not_overflow() {
    let key = |parts: usize| vec!["a"; parts].join(".");
    let tables = |parts: usize, depth: usize| {
        let open = format!("{{ {} = ", key(parts)).repeat(depth);
        format!("{open}1{}", "}".repeat(depth))
    };
    let nested = |parts: usize, depth: usize| {
        format!("version = 1\n[{0}]\n{0} = {1}\n", key(parts), tables(parts, depth))
    };
    assert_eq!(problem(&nested(79, 79)), Problem::KeyTooDeep);
    // The deepest that reaches the parser's tree; a test's stack is 2 MiB.
    assert!(matches!(problem(&nested(8, 79)), Problem::UnknownKey { .. }));
    // A table in place of a scalar is dropped unread.
    let found = task_problem(&format!("iops = {}", tables(8, 79)));
    assert!(matches!(found, Problem::WrongType { key: "iops", .. }), "{found}");
}

#[test]
fn more_entries_than_the_limit_are_refused() {
    let head = "version = 1\n[device.d]\npath = \"/dev/d\"\nprofile = \"p\"\n";
    let vms = |n: usize| {
        let mut text = head.to_owned();
        for i in 0..n {
            text.push_str(&format!(
                "[[vm]]\nname = \"v{i}\"\ndisk = [{{ name = \"d\", device = \"d\" }}]\n"
            ));
        }
        text
    };
    assert_eq!(parse("s.toml", &vms(10_000)).unwrap().vms.len(), 10_000);
    let too_many = |kind, count, limit| Problem::TooMany { kind, count, limit };
    assert_eq!(problem(&vms(10_001)), too_many(Kind::Vm, 10_001, 10_000));

    let disks = |n: usize| {
        let mut text = format!("{head}[[vm]]\nname = \"v\"\n");
        for i in 0..n {
            text.push_str(&format!("[[vm.disk]]\nname = \"d{i}\"\ndevice = \"d\"\n"));
        }
        text
    };
    assert!(parse("s.toml", &disks(64)).is_ok());
    assert_eq!(problem(&disks(65)), too_many(Kind::Disk, 65, 64));
    let tasks = |n: usize| {
        let mut text = disks(1);
        for i in 0..n {
            text.push_str(&format!("[[vm.task]]\nname = \"t{i}\"\n"));
        }
        text
    };
    assert!(parse("s.toml", &tasks(64)).is_ok());
    assert_eq!(problem(&tasks(65)), too_many(Kind::Task, 65, 64));
}

#[test]
fn error_of_a_long_hostile_text_stays_short() {
    let error = refused(&format!("version = 1\n{} = 1\n", "k".repeat(1 << 20)));
    assert!(error.to_string().len() < 400 && error.hint().len() < 400);
    let name = format!("name = \"{}\"", "\u{1F600}".repeat(1 << 16));
    let error = refused(&FULL.replacen("name = \"plc\"", &name, 1));
    assert!(error.to_string().len() < 600 && error.hint().len() < 400);
}

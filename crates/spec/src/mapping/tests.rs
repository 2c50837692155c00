use proptest::prelude::*;

use super::read::{Format, Found, ReadError, format_of, read, rename};
use super::*;
use crate::mapping::write::{
    FrontEnd, libvirt_disk, libvirt_driver, libvirt_ids, qemu_arguments, qemu_front_end, qemu_json,
    toml,
};

fn name(text: &str) -> IoThreadName {
    IoThreadName::new(text).unwrap()
}

fn entry(iothread: &str, vqs: &[u32]) -> Entry {
    Entry { iothread: name(iothread), vqs: Some(vqs.to_vec()) }
}

fn bare(iothread: &str) -> Entry {
    Entry::round_robin(name(iothread))
}

fn names(mapping: &Mapping) -> Vec<&str> {
    mapping.by_queue().iter().map(IoThreadName::as_str).collect()
}

#[test]
fn round_robin_is_as_qemu_does_it() {
    let mapping = Mapping::new(&[bare("a"), bare("b")], 5, None).unwrap();
    assert_eq!(names(&mapping), ["a", "b", "a", "b", "a"]);
    // QEMU does not tell an empty list from none, and leaves IOThreads without a queue alone.
    let mapping = Mapping::new(&[bare("a"), entry("b", &[]), bare("c")], 2, None).unwrap();
    assert_eq!(names(&mapping), ["a", "b"]);
}

#[test]
fn explicit_queues_are_kept() {
    let mapping = Mapping::new(&[entry("b", &[2, 0]), entry("a", &[1])], 3, None).unwrap();
    assert_eq!(names(&mapping), ["b", "a", "b"]);
    assert_eq!(mapping.entries(), [entry("b", &[0, 2]), entry("a", &[1])]);
    assert_eq!(mapping.iothreads(), [&name("b"), &name("a")]);
}

/// In the words of hw/virtio/iothread-vq-mapping.c.
#[test]
fn qemu_refusals_are_all_mirrored() {
    let known: BTreeSet<_> = ["a", "b"].map(name).into();
    let refused = |entries: &[Entry], queues| {
        Mapping::new(entries, queues, Some(&known)).unwrap_err().to_string()
    };
    assert_eq!(refused(&[bare("c")], 1), "IOThread \"c\" object does not exist");
    assert_eq!(
        refused(&[bare("a"), bare("a")], 1),
        "duplicate IOThread name \"a\" in iothread-vq-mapping"
    );
    let mixed = "either all items in iothread-vq-mapping must have vqs or none of them must have it \
                 (IOThread \"b\" differs from the first)";
    assert_eq!(refused(&[bare("a"), entry("b", &[0])], 1), mixed);
    assert_eq!(refused(&[entry("a", &[0]), bare("b")], 1), mixed);
    assert_eq!(
        refused(&[entry("a", &[0, 2])], 2),
        "vq index 2 for IOThread \"a\" must be less than num_queues 2 in iothread-vq-mapping"
    );
    assert_eq!(
        refused(&[entry("a", &[0, 1]), entry("b", &[1])], 2),
        "cannot assign vq 1 to IOThread \"b\" because it is already assigned"
    );
    assert_eq!(
        refused(&[entry("a", &[0]), entry("b", &[2])], 3),
        "missing vq 1 IOThread assignment in iothread-vq-mapping"
    );
    assert_eq!(refused(&[], 1), "iothread-vq-mapping is empty");
    assert_eq!(refused(&[bare("a")], 0), "queues is 0, outside 1 to 64");
    assert_eq!(refused(&[bare("a")], 65), "queues is 65, outside 1 to 64");
    assert!(refused(&[entry("a", &[0, 0])], 1).contains("already assigned"));
}

#[test]
fn queue_is_assigned_anew_if_it_is_there() {
    let mut mapping = Mapping::new(&[bare("a")], 2, None).unwrap();
    mapping.assign(1, name("b")).unwrap();
    assert_eq!(names(&mapping), ["a", "b"]);
    assert!(matches!(
        mapping.assign(2, name("b")),
        Err(MappingError::NoSuchQueue { queue: 2, queues: 2, .. })
    ));
}

#[test]
fn format_is_told_by_the_beginning() {
    for (text, format) in [
        ("[{\"iothread\":\"a\"}]", Format::Qemu),
        (" [ ]", Format::Qemu),
        ("{\"driver\":\"virtio-blk-pci\"}", Format::Qemu),
        ("-device '{}'", Format::Qemu),
        ("\u{feff}<driver/>", Format::Libvirt),
        ("  <?xml version='1.0'?><domain/>", Format::Libvirt),
        ("[[device]]", Format::Toml),
        ("[control]", Format::Toml),
        ("mapping = []", Format::Toml),
        ("", Format::Toml),
    ] {
        assert_eq!(format_of(text), format, "{text:?}");
    }
}

#[test]
fn qemu_json_is_read_with_and_without_a_device() {
    let array = r#"[{"iothread":"iot0","vqs":[0,2]},{"iothread":"iot1","vqs":[1,3]}]"#;
    let entries = vec![entry("iot0", &[0, 2]), entry("iot1", &[1, 3])];
    let expected = Found { entries: entries.clone(), queues: None };
    assert_eq!(read(array, None).unwrap(), expected);
    // As editors of some systems write it.
    assert_eq!(read(&format!("\u{feff}{array}"), None).unwrap(), expected);
    let device = format!(
        r#"{{"driver":"virtio-blk-pci","drive":"d","num-queues":4,"iothread-vq-mapping":{array}}}"#
    );
    let found = read(&device, None).unwrap();
    assert_eq!(found, Found { entries, queues: Some(4) });
    assert_eq!(names(&found.mapping(None).unwrap()), ["iot0", "iot1", "iot0", "iot1"]);

    let one = read(r#"{"driver":"virtio-blk-pci","iothread":"a","num-queues":2}"#, None).unwrap();
    assert_eq!(names(&one.mapping(None).unwrap()), ["a", "a"]);
    let both = r#"{"iothread":"a","iothread-vq-mapping":[{"iothread":"a"}]}"#;
    let both = read(both, None).unwrap_err();
    let words = "iothread and iothread-vq-mapping properties cannot be set at the same time";
    assert_eq!(both.to_string(), words);
}

#[test]
fn number_of_queues_is_the_callers_the_texts_or_the_lists() {
    let found = read(r#"[{"iothread":"a"},{"iothread":"b"}]"#, None).unwrap();
    assert!(matches!(found.mapping(None), Err(ReadError::HowManyQueues)));
    assert_eq!(names(&found.mapping(Some(3)).unwrap()), ["a", "b", "a"]);
    let found = read(r#"[{"iothread":"a","vqs":[1]},{"iothread":"b","vqs":[0]}]"#, None).unwrap();
    assert_eq!(names(&found.mapping(None).unwrap()), ["b", "a"]);
    assert!(matches!(
        read("[]", None).unwrap().mapping(None),
        Err(ReadError::Mapping(MappingError::Empty))
    ));
}

/// As docs/formatdomain.rst of libvirt shows it, three ways.
#[test]
fn libvirt_xml_is_read_alone_in_a_disk_and_in_a_domain() {
    let driver = "<driver name='qemu' queues='3'>
        <iothreads>
          <iothread id='2'><queue id='1'/></iothread>
          <iothread id='3'><queue id='0'/><queue id='2'/></iothread>
        </iothreads>
      </driver>";
    let expected = ["iothread3", "iothread2", "iothread3"];
    let disk = |alias: &str, target: &str, driver: &str| {
        format!("<disk type='file'>{driver}<target dev='{target}'/><alias name='{alias}'/></disk>")
    };
    let domain = format!(
        "<?xml version='1.0'?>\n<domain><iothreads>3</iothreads><devices>{}{}</devices></domain>",
        disk("ua-root", "vda", driver),
        disk("ua-log", "vdb", "<driver queues='2' iothread='1'/>"),
    );
    let mapped = |text: &str, disk| {
        let mapping = read(text, disk).unwrap().mapping(None).unwrap();
        mapping.by_queue().iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(mapped(driver, None), expected);
    assert_eq!(mapped(&format!("{driver}\n<alias name='ua-root'/>\n"), None), expected);
    for choice in ["root", "ua-root", "vda"] {
        assert_eq!(mapped(&domain, Some(choice)), expected);
    }
    assert_eq!(mapped(&domain, Some("vdb")), ["iothread1", "iothread1"]);
    assert!(matches!(read(&domain, None), Err(ReadError::WhichDisk(2))));
    assert!(matches!(read(&domain, Some("vdc")), Err(ReadError::WhichDisk(2))));

    let mut alone =
        read("<iothreads><iothread id='1'/><iothread id='2'/></iothreads>", None).unwrap();
    assert_eq!(alone.entries, [bare("iothread1"), bare("iothread2")]);
    rename(&mut alone, &[name("iot0")]);
    assert_eq!(alone.entries, [bare("iot0"), bare("iothread2")]);
}

#[test]
fn text_without_a_mapping_is_refused_with_a_hint() {
    let refused = [
        ("{\"driver\":\"virtio-blk-pci\"}", "there is no iothread-vq-mapping"),
        ("{", "QEMU's JSON"),
        ("[{\"iothread\":\"a\",\"vq\":[1]}]", "unknown field `vq`"),
        ("[{\"iothread\":\"a b\"}]", "not allowed in a name"),
        ("[{\"iothread\":\"a\",\"vqs\":[-1]}]", "QEMU's JSON"),
        ("-object iothread,id=a", "there is no iothread-vq-mapping"),
        ("<disk/>", "there is no <iothreads>"),
        ("<disk>", "libvirt's XML"),
        ("<!DOCTYPE x [<!ENTITY a 'b'>]><iothreads/>", "libvirt's XML"),
        ("<iothreads><iothread id='+1'/></iothreads>", "line 1: <iothread> wants id='NUMBER'"),
        ("<iothreads><iothread/></iothreads>", "<iothread> wants id"),
        ("<driver queues='x'><iothreads/></driver>", "<driver> wants queues"),
        ("queues = 1", "there is no mapping"),
        ("mapping = 1", "TOML: invalid type"),
        ("a.b.c.d.e.f.g.h.i = 1", "more than 8 parts"),
    ];
    for (text, words) in refused {
        let error = read(text, None).unwrap_err();
        assert!(error.to_string().contains(words), "{text}: {error}");
        assert!(!error.hint().is_empty());
    }
    assert!(matches!(read(&" ".repeat(2 << 20), None), Err(ReadError::TooLarge(2_097_152))));
    let many = format!("[{{\"iothread\":\"a\",\"vqs\":[{}0]}}]", "0,".repeat(5000));
    assert!(matches!(read(&many, None), Err(ReadError::TooMany)));
}

fn four_queues() -> Mapping {
    Mapping::new(&[bare("iot0"), bare("iot1")], 4, None).unwrap()
}

#[test]
fn written_text_is_as_expected() {
    let mapping = four_queues();
    let json = r#"[{"iothread":"iot0","vqs":[0,2]},{"iothread":"iot1","vqs":[1,3]}]"#;
    assert_eq!(qemu_json(&mapping), json);
    let device =
        format!(r#"{{"driver":"virtio-blk-pci","num-queues":4,"iothread-vq-mapping":{json}}}"#);
    assert_eq!(
        qemu_arguments(&mapping),
        [
            ("-object", "iothread,id=iot0".to_owned()),
            ("-object", "iothread,id=iot1".to_owned()),
            ("-device", device),
        ]
    );
    assert_eq!(
        toml(&mapping),
        "queues = 4\n\
         mapping = [\n\
         \x20 { iothread = \"iot0\", vqs = [0, 2] },\n\
         \x20 { iothread = \"iot1\", vqs = [1, 3] },\n\
         ]\n"
    );
    // iot0 and iot1 are no names of libvirt's: they are numbered.
    let ids: Vec<_> =
        libvirt_ids(&mapping).into_iter().map(|(n, i)| (n.to_string(), i.get())).collect();
    assert_eq!(ids, [("iot0".to_owned(), 1), ("iot1".to_owned(), 2)]);
    assert_eq!(
        libvirt_driver(&mapping),
        "<driver name='qemu' queues='4'>\n\
         \x20 <iothreads>\n\
         \x20   <iothread id='1'>\n\
         \x20     <queue id='0'/>\n\
         \x20     <queue id='2'/>\n\
         \x20   </iothread>\n\
         \x20   <iothread id='2'>\n\
         \x20     <queue id='1'/>\n\
         \x20     <queue id='3'/>\n\
         \x20   </iothread>\n\
         \x20 </iothreads>\n\
         </driver>\n"
    );
}

#[test]
fn front_end_text_is_as_expected_and_escaped() {
    let disk = rtvirtio_units::DiskName::new("vm0-root").unwrap();
    let socket = std::path::Path::new("/run/a,'<&b.sock");
    let device = FrontEnd { name: &disk, socket, queues: 4 };
    assert_eq!(
        qemu_front_end(&device),
        [
            (
                "-chardev",
                "socket,id=char-vm0-root,path=/run/a,,'<&b.sock,reconnect-ms=20".to_owned()
            ),
            (
                "-device",
                "vhost-user-blk-pci,id=disk-vm0-root,chardev=char-vm0-root,num-queues=4".to_owned()
            ),
        ]
    );
    assert_eq!(
        libvirt_disk(&device, "vda"),
        "<disk type='vhostuser' device='disk'>\n\
         \x20 <driver name='qemu' type='raw' queues='4'/>\n\
         \x20 <source type='unix' path='/run/a,&apos;&lt;&amp;b.sock'>\n\
         \x20   <reconnect enabled='yes' timeout='1'/>\n\
         \x20 </source>\n\
         \x20 <target dev='vda' bus='virtio'/>\n\
         </disk>\n"
    );
}

/// Any mapping: each queue's IOThread by a number of one of eight.
fn any_mapping() -> impl Strategy<Value = Mapping> {
    proptest::collection::vec(1_u32..=8, 1..=64).prop_map(|owners| {
        let mut mapping = Mapping::new(&[bare("iothread1")], owners.len() as u32, None).unwrap();
        for (queue, owner) in (0..).zip(owners) {
            mapping.assign(queue, name(&format!("iothread{owner}"))).unwrap();
        }
        mapping
    })
}

proptest! {
    #[test]
    fn mapping_survives_each_format(mapping in any_mapping()) {
        let arguments = qemu_arguments(&mapping).into_iter();
        let arguments: String = arguments.map(|(o, v)| format!("{o} '{v}'\n")).collect();
        let device = qemu_arguments(&mapping).pop().unwrap().1;
        let texts = [qemu_json(&mapping), device, arguments, libvirt_driver(&mapping), toml(&mapping)];
        for text in texts {
            let found = read(&text, None).unwrap();
            prop_assert_eq!(&found.mapping(None).unwrap(), &mapping, "{}", text);
        }
    }

    #[test]
    fn every_queue_has_one_iothread(
        queues in 1_u32..=64,
        lists in proptest::collection::vec(proptest::collection::vec(0_u32..66, 0..6), 0..6),
    ) {
        let entries: Vec<Entry> = (0..).zip(&lists).map(|(i, l)| entry(&format!("t{i}"), l)).collect();
        if let Ok(mapping) = Mapping::new(&entries, queues, None) {
            prop_assert_eq!(u32::from(mapping.queues()), queues);
            if lists.iter().any(|l| !l.is_empty()) {
                for (i, list) in (0..).zip(&lists) {
                    for &queue in list {
                        let thread = name(&format!("t{i}"));
                        prop_assert_eq!(mapping.iothread(queue as u16), Some(&thread));
                    }
                }
            }
        }
    }

    #[test]
    fn hostile_text_is_refused_without_panic(text in "[\\[\\]{}<>/='\"a-z0-9:, \\n&;!?-]{0,200}") {
        let _ = read(&text, Some("a")).map(|found| found.mapping(None));
        let _ = read(&format!("<{text}"), None).map(|found| found.mapping(None));
    }
}

#[test]
fn one_of_several_devices_is_chosen_by_name_or_none_is() {
    let blk = |id: &str, thread: &str| {
        format!(
            "-device '{{\"driver\":\"virtio-blk-pci\",\"id\":\"{id}\",\"num-queues\":2,\
             \"iothread-vq-mapping\":[{{\"iothread\":\"{thread}\"}}]}}'"
        )
    };
    let plain = "-device virtio-blk-pci,id=plain,drive=d";
    let one = "-device virtio-blk-pci,id=one,drive=d,num-queues=2,iothread=io9";
    let scsi = "-device '{\"driver\":\"virtio-scsi-pci\",\"id\":\"s\",\"iothread-vq-mapping\":\
                [{\"iothread\":\"io5\"}]}'";
    let mapped = |text: &str, disk| {
        let mapping = read(text, disk).and_then(|found| found.mapping(Some(2)));
        mapping.map(|mapping| mapping.by_queue()[0].to_string()).map_err(|e| e.to_string())
    };
    let is = |name: &str| Ok(name.to_owned());
    // On lines of their own, or on one.
    for between in ["\n", " ", " \\\n    "] {
        let two = [&blk("a", "io1"), plain, &blk("b", "io2"), one, scsi].join(between);
        assert_eq!(mapped(&two, Some("a")), is("io1"));
        assert_eq!(mapped(&two, Some("b")), is("io2"));
        assert_eq!(mapped(&two, Some("one")), is("io9"));
        for nobody in [None, Some("c")] {
            assert!(mapped(&two, nobody).unwrap_err().contains("4 disks"), "{nobody:?}");
        }
        assert!(mapped(&two, Some("plain")).unwrap_err().contains("no iothread-vq-mapping"));
        assert!(mapped(&two, Some("s")).unwrap_err().contains("virtio-scsi-pci"));
    }
    // Only one has IOThreads: it is not taken for another.
    let only = format!("{}\n{plain}", blk("a", "io1"));
    assert_eq!(mapped(&only, None), is("io1"));
    assert!(mapped(&only, Some("plain")).unwrap_err().contains("no iothread-vq-mapping"));
    assert!(mapped(&only, Some("c")).unwrap_err().contains("2 disks"));
    // The text is of one disk, whatever it is called there.
    assert_eq!(mapped(&blk("a", "io1"), Some("d0")), is("io1"));
    assert!(mapped(scsi, None).unwrap_err().contains("virtio-scsi-pci"));
    // What only looks like it.
    assert!(mapped("-x-device '{}'", None).unwrap_err().contains("no iothread-vq-mapping"));
}

#[test]
fn disk_without_iothreads_and_controllers_are_not_answered_by_another_disks() {
    let disk = |target: &str, driver: &str| {
        format!("<disk type='file'>{driver}<target dev='{target}'/></disk>")
    };
    let controller = "<controller type='scsi' model='virtio-scsi'><driver queues='2'><iothreads>\
        <iothread id='7'/></iothreads></driver></controller>";
    let domain = |parts: &[&str]| format!("<domain><devices>{}</devices></domain>", parts.concat());
    let (vda, vdb) = (disk("vda", "<driver queues='2' iothread='1'/>"), disk("vdb", "<driver/>"));
    let mapped = |text: &str, disk| {
        let mapping = read(text, disk).and_then(|found| found.mapping(None));
        mapping.map(|mapping| mapping.by_queue()[0].to_string()).map_err(|e| e.to_string())
    };
    let two = domain(&[controller, &vda, &vdb]);
    assert_eq!(mapped(&two, Some("vda")), Ok("iothread1".to_owned()));
    assert_eq!(mapped(&two, None), Ok("iothread1".to_owned()));
    assert!(mapped(&two, Some("vdb")).unwrap_err().contains("no <iothreads> of this disk"));
    assert!(mapped(&two, Some("vdc")).unwrap_err().contains("2 disks"));
    for only in [domain(&[controller]), domain(&[controller, &vdb]), controller.to_owned()] {
        assert!(mapped(&only, None).unwrap_err().contains("<controller>"), "{only}");
    }
    assert_eq!(mapped(&vda, Some("d0")), Ok("iothread1".to_owned()));
}

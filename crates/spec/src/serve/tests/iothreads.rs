//! How IOThreads wait, and the policy of I/O cores.

use super::*;

/// Two IOThreads of these keys.
fn waiting(first: &str, second: &str) -> Result<Vec<IoThread>, ServeError> {
    let text = format!(
        "version = 1\n[[iothread]]\nname = \"a\"\n{first}\n[[iothread]]\nname = \"b\"\n{second}\n"
    );
    parse("serve.toml", &text).map(|found| found.iothreads)
}

#[test]
fn iothreads_say_how_they_wait_and_whose_their_core_is() {
    let found = waiting("completion = \"poll\"", "core = \"dedicated\"\ncpus = [1]").unwrap();
    let polling: Vec<_> = found.iter().map(|t| (t.polling.completion, t.polling.core)).collect();
    let (poll, adaptive) = (Completion::Poll, Completion::Adaptive);
    assert_eq!(polling, [(poll, CorePolicy::Shared), (adaptive, CorePolicy::Dedicated)]);
    // One that may run anywhere stays out of nobody's way, but is told of no CPU.
    assert!(waiting("", "core = \"dedicated\"\ncpus = [1]").is_ok());
    assert!(waiting("cpus = [0, 1]", "core = \"auto\"\ncpus = [1]").is_ok());
    for (first, second, line, words) in [
        ("core = \"dedicated\"", "", 2, "a dedicated core is one CPU, and cpus has 0"),
        ("core = \"dedicated\"\ncpus = [1, 2]", "", 5, "one CPU, and cpus has 2"),
        (
            "core = \"dedicated\"\ncpus = [1]",
            "cpus = [0, 1]",
            8,
            "CPU 1 would be dedicated, and is that of iothread \"a\" too",
        ),
        ("cpus = [0, 1]", "core = \"dedicated\"\ncpus = [1]", 8, "CPU 1 would be dedicated"),
        ("completion = \"poll\"\ncore = \"auto\"", "", 5, "\"poll\" has no key `core`"),
        ("completion = \"interrupt\"\npoll_max_us = 5", "", 5, "has no key `poll_max_us`"),
        ("completion = \"spin\"", "", 4, "unknown variant `spin`"),
        ("core = \"mine\"", "", 4, "unknown variant `mine`"),
    ] {
        let error = waiting(first, second).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words), "{text}");
        assert!(text.starts_with(&format!("serve.toml:{line}:")), "{text}, not line {line}");
        assert!(!error.hint().is_empty());
    }
    for completion in Completion::ALL {
        assert_eq!(completion.to_string().parse(), Ok(completion));
    }
    for core in CorePolicy::ALL {
        assert_eq!(core.to_string().parse(), Ok(core));
    }
}

fn iocores(table: &str) -> Result<IoCores, ServeError> {
    let text = format!("version = 1\n[[iothread]]\nname = \"iot0\"\n[iocores]\n{table}");
    parse("serve.toml", &text).map(|found| found.iocores)
}

#[test]
fn policy_has_defaults_and_keeps_the_order_of_cpus() {
    let cpus = |cpus: &[u32]| cpus.iter().copied().map(CpuId::new).collect::<Vec<_>>();
    let of = |policy, cpus, min_iothreads, max_iothreads| IoCores {
        policy,
        cpus,
        min_iothreads,
        max_iothreads,
        borrow: false,
    };
    assert_eq!(iocores("").unwrap(), of(Policy::Static, vec![], 1, 1));
    assert_eq!(
        iocores("policy = \"dynamic\"\ncpus = [3, 1, 2]\n").unwrap(),
        of(Policy::Dynamic, cpus(&[3, 1, 2]), 1, 3)
    );
    let all = iocores(
        "policy = \"spdk\"\ncpus = [3, 1, 2]\nmin_iothreads = 2\nmax_iothreads = 2\nborrow = false\n",
    );
    let all = all.unwrap();
    assert_eq!(all, of(Policy::Spdk, cpus(&[3, 1, 2]), 2, 2));
    let change = |raw: wire::IoCores| IoCores::new(raw, all.clone()).unwrap();
    let named = wire::IoCores { policy: Some(Policy::Iocm), ..wire::IoCores::default() };
    assert_eq!(change(named), of(Policy::Iocm, cpus(&[3, 1, 2]), 2, 2));
    let borrowing = wire::IoCores { borrow: Some(true), ..wire::IoCores::default() };
    assert_eq!(change(borrowing), IoCores { borrow: true, ..all.clone() });
    let placed = wire::IoCores { cpus: Some(cpus(&[7])), ..wire::IoCores::default() };
    assert_eq!(change(placed), of(Policy::Spdk, cpus(&[7]), 1, 1));
    for policy in Policy::ALL {
        assert_eq!(policy.name().parse(), Ok(policy));
        assert_eq!(serde_json::to_value(policy).unwrap(), policy.name());
    }
}

#[test]
fn fault_of_a_policy_is_named_with_its_line_and_a_hint() {
    for (table, line, words) in [
        ("policy = \"fast\"", 5, "unknown variant `fast`"),
        ("policy = \"dynamic\"", 5, "policy \"dynamic\" adds IOThreads, and there are no cpus"),
        ("policy = \"dynamic\"\ncpus = []", 6, "CPUs is 0, outside 1 to 64"),
        ("cpus = [1024]", 5, "CPU 1024 is beyond 1023"),
        ("cpus = [1, 2, 1]", 5, "CPU 1 is named twice"),
        ("cpus = [1, 2]\nmax_iothreads = 3", 6, "max_iothreads is 3, outside 1 to 2"),
        (
            "cpus = [1, 2]\nmax_iothreads = 1\nmin_iothreads = 2",
            7,
            "min_iothreads is 2, outside 1 to 1",
        ),
        ("cpus = [1]\nmin_iothreads = 0", 6, "min_iothreads is 0, outside 1 to 1"),
        ("cpu = [1]", 5, "unknown key \"cpu\""),
    ] {
        let error = iocores(table).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(words), "{table}: {text}");
        assert!(text.starts_with(&format!("serve.toml:{line}:")), "{table}: {text}, not {line}");
        assert!(!error.hint().is_empty());
    }
}

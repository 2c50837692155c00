//! `rtvirtio-lab simulate`.

use std::path::Path;

use crate::scratch_disk::{lab, output, said};

const SMALL: [&str; 9] =
    ["simulate", "--cpus", "4", "--vms", "4", "--phases", "one-hot,compute", "--seconds", "0.5"];

fn simulate(further: &[&str]) -> std::process::Output {
    let arguments: Vec<&str> = SMALL.iter().chain(further).copied().collect();
    output(&lab(), Path::new("/nonexistent"), &arguments)
}

#[test]
fn simulation_compares_policies_by_phase_and_is_the_same_for_the_same_seed() {
    let runs = || {
        let output = simulate(&["--policy", "static:1,static:2,dynamic", "--json"]);
        assert!(output.status.success(), "{}", said(&output));
        let mut report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for run in report["runs"].as_array_mut().unwrap() {
            run.as_object_mut().unwrap().remove("took_s").unwrap();
        }
        report
    };
    let report = runs();
    assert_eq!(report, runs());
    let of = report["runs"].as_array().unwrap();
    let policies: Vec<_> = of.iter().map(|run| run["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["static:1", "static:2", "dynamic"]);
    for run in of {
        assert_eq!(run["phases"].as_array().unwrap().len(), 2);
        assert_eq!(run["utility"].as_array().unwrap().len(), 3);
    }
    // One full queue and two IOThreads: one of them has nothing to do.
    let busy = of[1]["whole"]["busy"].as_f64().unwrap();
    assert!((0.3..1.1).contains(&busy), "{busy}");
}

#[test]
fn simulation_prints_a_row_for_each_phase_and_policy_and_one_for_all() {
    let output = simulate(&["--policy", "static:1"]);
    assert!(output.status.success(), "{}", said(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    for phase in ["one-hot", "compute", "whole"] {
        let rows = text.lines().filter(|line| line.trim_start().starts_with(phase));
        assert_eq!(rows.count(), 1, "{text}");
    }
}

/// As many as 64 bits hold, and no more: one that is too large is not another one.
#[test]
fn seed_is_refused_that_no_64_bits_hold() {
    let largest = simulate(&["--policy", "static:1", "--seed", "18446744073709551615"]);
    assert!(largest.status.success(), "{}", said(&largest));
    for verb in [&SMALL[..], &["scratch"], &["bench", "iothreads"]] {
        for seed in ["18446744073709551616", "-1", "1e3"] {
            let seed = format!("--seed={seed}");
            let arguments = [verb, &[&seed]].concat();
            let output = output(&lab(), Path::new("/nonexistent"), &arguments);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains("--seed"), "{said}");
        }
    }
}

#[test]
fn simulation_that_cannot_be_is_refused_with_1() {
    for (wrong, word) in [
        (["--policy", "static"], "static:2"),
        (["--policy", "dynamic:2"], "itself"),
        (["--policy", "static:5"], "4 CPUs"),
        (["--policy", "fast"], "fast"),
        (["--phases", "busy"], "busy"),
        (["--request-us", "nan"], "--request-us"),
        (["--disk", "floppy"], "floppy"),
        (["--costs", "/nonexistent"], "/nonexistent"),
    ] {
        let output = simulate(&wrong);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(word), "{}", said(&output));
    }
}

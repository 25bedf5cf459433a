//! `k8e catalog`: the command tree as JSON.

use k8e_e2e::{Ran, binary};
use serde_json::Value;
use std::process::{Command, Stdio};

fn catalog(args: &[&str]) -> Ran {
    let output = Command::new(binary())
        .arg("catalog")
        .args(args)
        // Its value must not get into the catalog.
        .env("K8E_SANDBOX_APIKEY", format!("k8e_{}", "5e".repeat(32)))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: output.stderr,
    }
}

fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let list = list.as_array().unwrap();
    let found = list.iter().find(|one| one["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {list:#?}"))
}

#[test]
fn the_catalog_has_every_command() {
    let ran = catalog(&[]);
    assert_eq!((ran.code, ran.err().as_str()), (0, ""), "{}", ran.all());
    assert!(
        !ran.out().contains("5e5e5e"),
        "an API key is in the catalog"
    );
    let catalog = ran.json();
    assert_eq!(catalog["catalog_version"], 1);
    assert_eq!(catalog["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        named(&catalog["global_flags"], "endpoint")["env"],
        "K8E_SANDBOX_ENDPOINT"
    );
    for name in [
        "server",
        "operator",
        "router",
        "check-config",
        "sandbox",
        "apikey",
        "template",
    ] {
        named(&catalog["commands"], name);
    }
    let server = named(&catalog["commands"], "server");
    named(&server["flags"], "allowed-hosts");
    let sandbox = named(&catalog["commands"], "sandbox");
    let save = named(&named(&sandbox["commands"], "snapshot")["commands"], "save");
    assert_eq!(save["command"], "k8e sandbox snapshot save");
    assert_eq!(
        save["synopsis"],
        "k8e sandbox snapshot save [OPTIONS] <SESSION> <NAME>"
    );
    let codes: Vec<i64> = catalog["exit_codes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|code| code["code"].as_i64().unwrap())
        .collect();
    assert_eq!(codes, [0, 1, 2, 130, 141]);
}

#[test]
fn one_command_of_the_catalog() {
    let read = catalog(&["sandbox", "read"]);
    assert_eq!(read.code, 0, "{}", read.all());
    let want = serde_json::json!({
        "name": "raw",
        "usage": "Print the content as bytes instead of JSON",
        "required": false,
        "repeated": false,
    });
    assert_eq!(named(&read.json()["flags"], "raw"), &want);
    let unknown = catalog(&["sandbox", "dance"]);
    assert_eq!(unknown.code, 1, "{}", unknown.all());
    assert_eq!(unknown.json()["detail"], "not_found");
}

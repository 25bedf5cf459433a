//! Packages for pip. No shell reads them, and pip reads none of them as an option, an address or a file.

use super::OUTPUT_BYTES_MAX;
use bytes::Bytes;
use k8e_model::{Command, Env, Error, Program, TimeLimit};
use std::collections::BTreeMap;
use std::time::Duration;

/// Timeout of an installation, as in the Go server.
const TIMEOUT: Duration = Duration::from_secs(120);

/// More is a file of requirements: write it and run pip.
const PACKAGES_MAX: usize = 256;

/// A name, some extras and some versions.
const SPEC_BYTES_MAX: usize = 512;

/// What tells versions apart, the longer ones first.
const OPERATORS: [&str; 8] = ["===", "==", "~=", "!=", "<=", ">=", "<", ">"];

/// Characters that the Go server refuses, and those that a shell interprets.
const REFUSED: [char; 17] = [
    ';', '&', '|', '`', '$', '(', ')', '\r', '\n', '\0', '\'', '"', '\\', '{', '}', '@', '/',
];

/// The command that installs packages. The machine's Python may be marked as its package manager's:
/// the sandbox's copy is the sandbox's, so that does not count.
pub fn pip_command(packages: &[String]) -> Result<Command, Error> {
    if packages.is_empty() {
        return Err(Error::invalid("no packages specified"));
    }
    if packages.len() > PACKAGES_MAX {
        return Err(Error::invalid(format!(
            "{} packages, at most {PACKAGES_MAX} are allowed: write a file of requirements and run pip with it",
            packages.len()
        )));
    }
    for package in packages {
        check(package)?;
    }
    let pip = ["python3", "-m", "pip", "install", "--no-cache-dir", "--"];
    let argv = pip
        .into_iter()
        .chain(packages.iter().map(|spec| spec.trim()));
    let argv = argv.map(|arg| Bytes::copy_from_slice(arg.as_bytes()));
    let argv = argv.collect();
    let mut command = Command::new(Program::Argv(argv))?;
    let env = ["PIP_BREAK_SYSTEM_PACKAGES", "PIP_DISABLE_PIP_VERSION_CHECK"];
    let env: BTreeMap<_, _> = env.map(|name| (name.to_owned(), "1".to_owned())).into();
    command.env = Env::try_from(env)?;
    command.timeout = TimeLimit::After(TIMEOUT);
    command.output_bytes_max = Some(OUTPUT_BYTES_MAX);
    Ok(command)
}

/// A name, perhaps `[extras]`, perhaps versions: `requests[socks]>=2,<3`.
fn check(spec: &str) -> Result<(), Error> {
    let shown = || spec.chars().take(64).collect::<String>();
    let bad_name = || Error::invalid(format!("invalid package name: {}", shown()));
    let bad_chars = || {
        Error::invalid(format!(
            "invalid characters in package specifier: {}",
            shown()
        ))
    };
    if spec.len() > SPEC_BYTES_MAX {
        return Err(bad_name());
    }
    if spec.contains(REFUSED) {
        return Err(bad_chars());
    }
    let spec = spec.trim();
    let versions_at = spec.find(['=', '~', '!', '<', '>']).unwrap_or(spec.len());
    let (name, versions) = spec.split_at(versions_at);
    let name = match name.trim().strip_suffix(']') {
        Some(name) => {
            let (name, extras) = name.split_once('[').ok_or_else(bad_name)?;
            if !extras.split(',').all(|extra| is_name(extra.trim())) {
                return Err(bad_name());
            }
            name
        }
        None => name,
    };
    if !is_name(name.trim()) {
        return Err(bad_name());
    }
    let good = versions.is_empty() || versions.split(',').all(is_version);
    good.then_some(()).ok_or_else(bad_chars)
}

/// Starts and ends with a letter or a digit: no option does.
fn is_name(name: &str) -> bool {
    let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    edge(bytes.first())
        && edge(bytes.last())
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

fn is_version(text: &str) -> bool {
    let text = text.trim();
    let version = OPERATORS.iter().find_map(|op| text.strip_prefix(op));
    let plain =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'*' | b'+' | b'!' | b'_' | b'-');
    version.is_some_and(|version| {
        let version = version.trim();
        !version.is_empty() && version.bytes().all(plain)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(spec: &str) -> String {
        pip_command(&[spec.to_owned()]).unwrap_err().message
    }

    #[test]
    fn what_pip_takes_goes_through_as_it_is() {
        let specs = [
            "requests",
            "requests>=2",
            "zope.interface",
            "a==1.0.*",
            "requests[socks, use_chardet_on_py3] >= 2.8.1, != 2.9",
            "x~=1.4.2",
            "x===1!2.0+local-1",
        ];
        let specs = specs.map(str::to_owned);
        let command = pip_command(&specs).unwrap();
        let Program::Argv(argv) = command.program else {
            panic!("no shell")
        };
        let want = ["python3", "-m", "pip", "install", "--no-cache-dir", "--"];
        let want = want.into_iter().chain(specs.iter().map(String::as_str));
        assert!(argv.iter().map(|arg| &arg[..]).eq(want.map(str::as_bytes)));
        assert_eq!(command.timeout, TimeLimit::After(TIMEOUT));
    }

    #[test]
    fn options_shells_files_and_addresses_do_not() {
        assert_eq!(
            pip_command(&[]).unwrap_err().message,
            "no packages specified"
        );
        for option in [
            "-r",
            "--index-url",
            "-e",
            "",
            " ",
            "a b",
            ".",
            "../x",
            "[x]",
            "a[",
            "a[-x]",
        ] {
            let message = refused(option);
            let names = message.starts_with("invalid package name: ");
            assert!(names || option.contains('/'), "{option:?}: {message}");
        }
        for spec in [
            "a;rm -rf .",
            "a && b",
            "a|b",
            "a`id`",
            "$(id)",
            "a\nb",
            "a @ https://evil.example/a.whl",
            "a>=1 --pre",
            "a>",
            "a==1,",
            "a=1",
        ] {
            let message = refused(spec);
            let want = "invalid characters in package specifier: ";
            assert!(message.starts_with(want), "{spec:?}: {message}");
        }
        let many = vec!["a".to_owned(); PACKAGES_MAX + 1];
        assert!(pip_command(&many).is_err());
        assert!(pip_command(&["a".repeat(SPEC_BYTES_MAX + 1)]).is_err());
    }
}

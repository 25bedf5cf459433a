//! What real clients fetch: packages for pip and npm, and a git repository, made here and now.

use super::Internet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the packages and the repository have inside, for a test to print.
pub const PACKAGED: &str = "packaged by the miniature internet";

/// Writes a wheel; arguments are the file, the package, its version, the source of its module and its `console_scripts`.
const WHEEL: &str = r#"
import sys, zipfile
file, package, version, source, scripts = sys.argv[1:]
info = f"{package}-{version}.dist-info/"
parts = {
    package + ".py": source,
    info + "entry_points.txt": f"[console_scripts]\n{scripts}\n",
    info + "METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
    info + "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}
with zipfile.ZipFile(file, "w") as wheel:
    for name, text in parts.items(): wheel.writestr(name, text)
    record = "".join(f"{name},,\n" for name in [*parts, info + "RECORD"])
    wheel.writestr(info + "RECORD", record)
"#;

/// A Python package of one module.
#[derive(Clone, Copy, Debug)]
pub struct Wheel<'a> {
    /// Name of the package and of its module.
    pub package: &'a str,
    /// Version of the package.
    pub version: &'a str,
    /// Python source of the module.
    pub source: &'a str,
    /// Programs that it installs, as in `entry_points.txt`; may be empty.
    pub scripts: &'a str,
}

impl Internet {
    /// A package index for pip at `https://{name}/simple/`, with `miniature` in it.
    pub fn publish_wheel(&self, name: &str) {
        let wheel = Wheel {
            package: "miniature",
            version: "1.0",
            source: &format!("SAYS = {PACKAGED:?}\ndef main(): print(SAYS)\n"),
            scripts: "miniature = miniature:main",
        };
        self.publish_to_index(name, wheel);
    }

    /// Adds a package to the index (PEP 503) at `https://{name}/simple/`.
    pub fn publish_to_index(&self, name: &str, wheel: Wheel<'_>) {
        let Wheel {
            package, version, ..
        } = wheel;
        let files = self.files(name).join("simple").join(package);
        std::fs::create_dir_all(&files).unwrap();
        let file = format!("{package}-{version}-py3-none-any.whl");
        let mut python = Command::new("/usr/bin/python3");
        run(python.args(["-c", WHEEL]).arg(files.join(&file)).args([
            package,
            version,
            wheel.source,
            wheel.scripts,
        ]));
        let page =
            format!("<!DOCTYPE html><html><body><a href=\"{file}\">{file}</a></body></html>");
        std::fs::write(files.join("index.html"), page).unwrap();
    }

    /// A registry for npm at `https://{name}/`, with `miniature` in it.
    pub fn publish_npm(&self, name: &str) {
        let files = self.files(name).join("miniature");
        std::fs::create_dir_all(files.join("-")).unwrap();
        let source = tempfile::tempdir().unwrap();
        let package = source.path().join("package");
        std::fs::create_dir(&package).unwrap();
        let manifest = serde_json::json!({ "name": "miniature", "version": "1.0.0" });
        std::fs::write(package.join("package.json"), manifest.to_string()).unwrap();
        let module = format!("module.exports = {PACKAGED:?}\n");
        std::fs::write(package.join("index.js"), module).unwrap();
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--gzip").arg("--file");
        tar.arg(files.join("-/miniature-1.0.0.tgz"))
            .arg("--directory");
        run(tar.arg(source.path()).arg("package"));
        let tarball = format!("https://{name}/miniature/-/miniature-1.0.0.tgz");
        let about = serde_json::json!({
            "name": "miniature",
            "dist-tags": { "latest": "1.0.0" },
            "versions": { "1.0.0": {
                "name": "miniature",
                "version": "1.0.0",
                "dist": { "tarball": tarball },
            }},
        });
        std::fs::write(files.join("index.json"), about.to_string()).unwrap();
    }

    /// A git repository at `https://{name}/miniature.git`.
    pub fn publish_git(&self, name: &str) {
        let source = tempfile::tempdir().unwrap();
        let git = |dir: &Path, args: &[&str]| {
            let mut git = Command::new("/usr/bin/git");
            git.env("HOME", source.path())
                .env("GIT_CONFIG_NOSYSTEM", "1");
            git.args([
                "-c",
                "user.name=test",
                "-c",
                "user.email=test@miniature.example",
            ]);
            run(git
                .args(["-c", "init.defaultBranch=main"])
                .args(args)
                .current_dir(dir));
        };
        let work = source.path().join("work");
        std::fs::create_dir(&work).unwrap();
        std::fs::write(work.join("README"), PACKAGED).unwrap();
        git(&work, &["init", "--quiet"]);
        git(&work, &["add", "README"]);
        git(&work, &["commit", "--quiet", "--message", "a file"]);
        let bare = self.files(name).join("miniature.git");
        // One test publishes it once for each runtime.
        drop(std::fs::remove_dir_all(&bare));
        let bare = bare.to_str().expect("a path in UTF-8");
        git(&work, &["clone", "--quiet", "--bare", ".", bare]);
        git(Path::new(bare), &["update-server-info"]);
    }

    /// Where the files of a name are.
    pub fn files(&self, name: &str) -> PathBuf {
        let dir = self.files.path().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }
}

fn run(command: &mut Command) {
    let output = command.output().expect("`cargo xtask setup` installs it");
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

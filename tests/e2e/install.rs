//! `deploy/install.sh`, in a fresh Debian with namespaces of its own: install, upgrade with a live session, uninstall.

use k8e_e2e::{binary, passable_tempdir, tools};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs in the new namespaces before anything of the new root does.
const ENTER: &str = r#"
set -e
mount --bind "$ROOT" "$ROOT"
mount --bind "$RELEASE" "$ROOT/release"
mount -t proc proc "$ROOT/proc"
mount --rbind /sys "$ROOT/sys"
mount --rbind /dev "$ROOT/dev"
cd "$ROOT"
pivot_root . mnt
umount -l /mnt
exec env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    INSTALL_K8E_URL=/release sh -eu /release/script
"#;

/// A person's first day, and the last.
const LIFE: &str = r#"
files() { find / -xdev -path /tmp -prune -o -print | LC_ALL=C sort; }
files >/tmp/before
K8E_EXAMPLE='a "$(false)' sh /release/install.sh
k8e sandbox run "print('hello')" --lang python --raw
stat -c 'settings %a' /etc/k8e/k8e.env
cat /etc/k8e/k8e.env
session=$(k8e sandbox create | sed 's/.*"session_id":"\([^"]*\)".*/\1/')
echo kept | k8e sandbox write "$session" file >/dev/null
was=$(cat /var/lib/k8e/lock)
# A byte after the end of a program changes nothing but its sum.
binary=$(echo /release/k8e-linux-*)
printf x >>"$binary"
! sh /release/install.sh 2>/tmp/refused
grep -o 'the checksum of .* is wrong' /tmp/refused | sed 's/-[a-z0-9]* is/ is/'
[ "$was" = "$(cat /var/lib/k8e/lock)" ] && echo "the old server runs on"
(cd /release && sha256sum k8e-linux-* k8e.service >SHA256SUMS)
sh /release/install.sh
[ "$was" = "$(cat /var/lib/k8e/lock)" ] || echo "another server"
cmp /usr/local/bin/k8e "$binary"
k8e sandbox read "$session" file --raw
sh /release/install.sh --uninstall
files >/tmp/after
diff /tmp/before /tmp/after && echo "nothing is left"
for process in /proc/[0-9]*; do
    case $(cat "$process/comm" 2>/dev/null) in k8e*) echo "left: $process" ;; esac
done
sh /release/install.sh --uninstall && echo "twice"
"#;

/// The files of a release.
fn release() -> tempfile::TempDir {
    let dir = passable_tempdir("k8e-release-");
    let machine = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "amd64",
    };
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    let copy = |from: PathBuf, name: &str| {
        k8e_e2e::install(&from, &dir.path().join(name));
    };
    copy(binary(), &format!("k8e-linux-{machine}"));
    copy(deploy.join("systemd/k8e.service"), "k8e.service");
    copy(deploy.join("install.sh"), "install.sh");
    sign(dir.path());
    dir
}

/// Writes the sums of a release.
fn sign(release: &Path) {
    let sums = "sha256sum k8e-linux-* k8e.service >SHA256SUMS";
    succeed(Command::new("sh").args(["-c", sums]).current_dir(release));
}

fn succeed(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {stdout}{stderr}");
    stdout
}

#[test]
fn it_installs_upgrades_with_a_live_session_and_leaves_nothing() {
    let (root, release) = (passable_tempdir("k8e-debian-"), release());
    let image = tools("images/python.tar");
    let mut unpack = Command::new("tar");
    unpack.args(["--numeric-owner", "-xf"]).arg(image);
    succeed(unpack.arg("-C").arg(root.path()));
    fs::create_dir(root.path().join("release")).unwrap();
    fs::write(release.path().join("script"), LIFE).unwrap();
    let said = succeed(
        Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child"])
            .args(["--propagation", "private", "sh", "-c", ENTER])
            .env("ROOT", root.path())
            .env("RELEASE", release.path()),
    );
    let want = "hello\nsettings 600\nK8E_EXAMPLE=\"a \\\"\\$(false)\"\n\
                the checksum of k8e-linux is wrong\nthe old server runs on\nanother server\nkept\n\
                nothing is left\ntwice\n";
    assert_eq!(said, want);
}

#[test]
fn a_signature_of_another_key_installs_nothing() {
    let release = release();
    let keys = tempfile::tempdir().unwrap();
    let key = |name: &str| {
        let (private, public) = (
            keys.path().join(name),
            keys.path().join(format!("{name}.pub")),
        );
        let mut make = Command::new("openssl");
        succeed(
            make.args(["genpkey", "-algorithm", "ed25519", "-out"])
                .arg(&private),
        );
        let mut show = Command::new("openssl");
        succeed(
            show.args(["pkey", "-pubout", "-in"])
                .arg(&private)
                .arg("-out")
                .arg(&public),
        );
        (private, public)
    };
    let (ours, theirs) = (key("ours"), key("theirs"));
    let sums = release.path().join("SHA256SUMS");
    let mut signature = Command::new("openssl");
    signature
        .args(["pkeyutl", "-sign", "-rawin", "-inkey"])
        .arg(&ours.0);
    signature
        .arg("-in")
        .arg(&sums)
        .arg("-out")
        .arg(release.path().join("SHA256SUMS.sig"));
    succeed(&mut signature);
    let bin = tempfile::tempdir().unwrap();
    let install = |public: &Path| {
        let output = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec"])
            // Nothing of it may reach the machine's own /etc.
            .arg(r#"mount -t tmpfs none /etc; exec sh "$0""#)
            .arg(release.path().join("install.sh"))
            .env("INSTALL_K8E_URL", release.path())
            .env("INSTALL_K8E_BIN_DIR", bin.path())
            .env("INSTALL_K8E_PUBLIC_KEY", public)
            .env("INSTALL_K8E_SKIP_START", "true")
            .env("INSTALL_K8E_SKIP_ENABLE", "true")
            .output()
            .unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (taken, said) = install(&theirs.1);
    assert!(
        !taken && said.contains("the signature of SHA256SUMS is wrong"),
        "{said}"
    );
    assert!(!bin.path().join("k8e").exists());
    let (taken, said) = install(&ours.1);
    assert!(taken && said.contains("installed k8e"), "{said}");
    assert!(bin.path().join("k8e").exists());
    // Sums that were changed after they were signed.
    sign(release.path());
    fs::write(&sums, fs::read_to_string(&sums).unwrap() + "\n").unwrap();
    let (taken, said) = install(&ours.1);
    assert!(
        !taken && said.contains("the signature of SHA256SUMS is wrong"),
        "{said}"
    );
}

#[test]
fn the_script_and_the_unit_are_clean() {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    succeed(Command::new("shellcheck").arg(deploy.join("install.sh")));
    let unit = fs::read_to_string(deploy.join("systemd/k8e.service")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("k8e.service");
    // Any program: the unit is checked, not what it starts.
    let unit = unit.replace("@BIN_DIR@/k8e @EXEC@", "/bin/true server");
    fs::write(&path, unit).unwrap();
    let output = Command::new("systemd-analyze")
        .arg("verify")
        .arg(&path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
}

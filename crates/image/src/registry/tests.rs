//! A registry on loopback that follows a script: it serves, lies, stalls and leads astray.

use super::*;
use serde_json::json;
use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// What a registry answers to a path and its `Authorization`.
type Script = Arc<dyn Fn(&str, Option<&str>) -> Said + Send + Sync>;

struct Said {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    /// Says that there is more, and sends nothing.
    stalls: bool,
}

/// Looks nothing up but one name.
struct Names(IpAddr);

impl Resolve for Names {
    fn resolve<'a>(
        &'a self,
        _: &'a str,
    ) -> Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send + 'a>> {
        Box::pin(async { Ok(vec![self.0]) })
    }
}

fn ok(body: impl Into<Vec<u8>>) -> Said {
    Said {
        status: "200 OK",
        headers: Vec::new(),
        body: body.into(),
        stalls: false,
    }
}

fn not_found() -> Said {
    Said {
        status: "404 Not Found",
        ..ok(r#"{"errors":[{"code":"X","message":"no such\nthing"}]}"#)
    }
}

fn redirect(to: &str) -> Said {
    Said {
        status: "307 Temporary Redirect",
        headers: vec![("Location", to.to_owned())],
        ..ok("")
    }
}

/// A registry on loopback; its authority.
async fn serve(script: Script) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = format!("localhost:{}", listener.local_addr().unwrap().port());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let script = Arc::clone(&script);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                    let mut part = [0; 1024];
                    match stream.read(&mut part).await {
                        Ok(read) if read > 0 => head.extend_from_slice(&part[..read]),
                        _ => return,
                    }
                }
                let head = String::from_utf8_lossy(&head).into_owned();
                let path = head.split(' ').nth(1).unwrap_or_default();
                let authorization = head.lines().find_map(|line| {
                    let (name, value) = line.split_once(": ")?;
                    name.eq_ignore_ascii_case("authorization").then_some(value)
                });
                let said = script(path, authorization);
                let more = usize::from(said.stalls);
                let mut answer = format!(
                    "HTTP/1.1 {}\r\nContent-Length: {}\r\nConnection: close\r\n",
                    said.status,
                    said.body.len() + more
                );
                for (name, value) in &said.headers {
                    answer.push_str(&format!("{name}: {value}\r\n"));
                }
                answer.push_str("\r\n");
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.write_all(&said.body).await;
                if said.stalls {
                    // Until the client has had enough.
                    let _ = stream.read(&mut [0; 1]).await;
                }
            });
        }
    });
    authority
}

fn policy(authority: &str) -> RegistryPolicy {
    RegistryPolicy::new(vec![authority.to_owned()], vec![], vec![]).unwrap()
}

fn image() -> (Vec<u8>, Vec<u8>) {
    let arch = crate::manifest::go_architecture();
    let config = json!({ "os": "linux", "architecture": arch, "rootfs": { "type": "layers", "diff_ids": [digest_of(b"layer").as_str()] } });
    let config = config.to_string().into_bytes();
    let manifest = json!({
        "schemaVersion": 2,
        "config": { "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(&config).as_str(), "size": config.len() },
        "layers": [{ "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest_of(b"layer").as_str(), "size": 5 }],
    });
    (manifest.to_string().into_bytes(), config)
}

async fn pull(policy: &RegistryPolicy, reference: &str) -> Result<Vec<u8>, ImageError> {
    pull_as(policy, reference, None).await
}

async fn pull_as(
    policy: &RegistryPolicy,
    reference: &str,
    credentials: Option<Credentials>,
) -> Result<Vec<u8>, ImageError> {
    let names = Arc::new(Names("127.0.0.1".parse().unwrap()));
    let reference = reference.parse().unwrap();
    let (mut registry, manifest) = Registry::find(policy, names, &reference, credentials).await?;
    let config = registry.config(&manifest).await?;
    manifest.image(&config)?;
    let mut stream = registry.blob(&manifest.layers[0].blob).await?;
    let mut layer = Vec::new();
    while let Some(part) = stream.next().await? {
        layer.extend_from_slice(&part);
    }
    Ok(layer)
}

/// A registry that has one image, whose layer is asked for at `layer`.
async fn registry(layer: impl Fn() -> Said + Send + Sync + 'static) -> String {
    let (manifest, config) = image();
    serve(Arc::new(move |path, _| match path {
        "/v2/app/manifests/1" => ok(manifest.clone()),
        path if path.ends_with(digest_of(&config).as_str()) => ok(config.clone()),
        path if path.starts_with("/v2/app/blobs/") => layer(),
        _ => not_found(),
    }))
    .await
}

#[tokio::test]
async fn an_image_is_fetched_through_a_redirect() {
    let other = serve(Arc::new(|_, authorization| {
        assert_eq!(authorization, None, "credentials stay with their host");
        ok("layer")
    }))
    .await;
    let to = format!("http://{other}/elsewhere?signed=1");
    let authority = registry(move || redirect(&to)).await;
    let both = RegistryPolicy::new(vec![authority.clone(), other], vec![], vec![]).unwrap();
    assert_eq!(
        pull(&both, &format!("{authority}/app:1")).await.unwrap(),
        b"layer"
    );
}

#[tokio::test]
async fn a_registry_leads_nowhere_that_was_not_allowed() {
    // The port of something else on this machine.
    let other = serve(Arc::new(|_, _| panic!("nobody may come here"))).await;
    for (to, says) in [
        (format!("http://{other}/x"), "only spoken to by TLS"),
        (format!("https://{other}/x"), "not a public address"),
        (
            "http://169.254.169.254/latest".to_owned(),
            "only spoken to by TLS",
        ),
        ("https://169.254.169.254/latest".to_owned(), "ever asked"),
        ("https://10.0.0.1/x".to_owned(), "not a public address"),
        ("https://[::1]/x".to_owned(), "IPv4"),
        (
            "https://rebound.example/x".to_owned(),
            "not a public address",
        ),
        ("file:///etc/passwd".to_owned(), "cannot be used"),
        ("https://user@host.example/x".to_owned(), "cannot be used"),
    ] {
        let target = to.clone();
        let authority = registry(move || redirect(&target)).await;
        let error = pull(&policy(&authority), &format!("{authority}/app:1")).await;
        let error = error.expect_err(&to).to_string();
        assert!(error.contains(says), "{to}: {error}");
    }
    // A token service, too.
    let challenge = format!("Bearer realm=\"http://{other}/token\"");
    let authority = serve(Arc::new(move |_, _| Said {
        status: "401 Unauthorized",
        headers: vec![("WWW-Authenticate", challenge.clone())],
        ..ok("")
    }))
    .await;
    let error = pull(&policy(&authority), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("only spoken to by TLS"),
        "{error}"
    );
    // And a registry that nobody allowed.
    let authority = registry(|| ok("layer")).await;
    let error = pull(&RegistryPolicy::default(), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Denied, "{error}");
}

#[tokio::test]
async fn a_registry_that_lies_is_caught() {
    for (body, says) in [
        ("layer and more", "more of a layer"),
        ("lay", "less of a layer"),
    ] {
        let authority = registry(move || ok(body)).await;
        let error = pull(&policy(&authority), &format!("{authority}/app:1"))
            .await
            .unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    let authority = registry(|| redirect("/v2/app/blobs/again")).await;
    let error = pull(&policy(&authority), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("without end"), "{error}");
    let authority = registry(|| Said {
        stalls: true,
        ..ok("laye")
    })
    .await;
    let error = pull(&policy(&authority), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Timeout, "{error}");
    let (manifest, _) = image();
    let pinned = digest_of(&manifest);
    let authority = serve(Arc::new(move |_, _| ok([&manifest[..], b" "].concat()))).await;
    let error = pull(&policy(&authority), &format!("{authority}/app@{pinned}"))
        .await
        .unwrap_err();
    assert!(matches!(error, ImageError::Digest { .. }), "{error}");
    let error = pull(&policy(&authority), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("configuration"), "{error}");
    let authority = serve(Arc::new(|_, _| ok(vec![b' '; MANIFEST_BYTES_MAX + 1]))).await;
    let error = pull(&policy(&authority), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Exhausted, "{error}");
    let authority = serve(Arc::new(|_, _| not_found())).await;
    let error = pull(&policy(&authority), &format!("{authority}/app:1"))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
    assert!(error.to_string().ends_with("no suchthing"), "{error}");
}

#[tokio::test]
async fn tokens_and_passwords_are_given_when_asked_for() {
    let (manifest, config) = image();
    let realm = Arc::new(std::sync::OnceLock::<String>::new());
    let own = Arc::clone(&realm);
    let authority = serve(Arc::new(move |path, authorization| {
        if path.starts_with("/token?") {
            assert_eq!(authorization, Some("Basic YW5uOnB3"));
            assert_eq!(path, "/token?service=s&scope=repository:app:pull");
            return ok(r#"{"token":"t0k"}"#);
        }
        if authorization != Some("Bearer t0k") {
            return Said {
                status: "401 Unauthorized",
                headers: vec![(
                    "WWW-Authenticate",
                    format!("Bearer realm=\"{}\",service=\"s\"", own.get().unwrap()),
                )],
                ..ok("")
            };
        }
        match path {
            "/v2/app/manifests/1" => ok(manifest.clone()),
            path if path.ends_with(digest_of(&config).as_str()) => ok(config.clone()),
            _ => ok("layer"),
        }
    }))
    .await;
    realm.set(format!("http://{authority}/token")).unwrap();
    let ann = Credentials {
        username: "ann".to_owned(),
        password: "pw".to_owned(),
    };
    assert!(!format!("{ann:?}").contains("pw"));
    let layer = pull_as(
        &policy(&authority),
        &format!("{authority}/app:1"),
        Some(ann),
    )
    .await;
    assert_eq!(layer.unwrap(), b"layer");
}

#[tokio::test]
async fn a_host_that_a_registry_redirects_to_gets_no_credentials() {
    let leaked = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let realm = Arc::new(std::sync::OnceLock::<String>::new());
    let (heard, own) = (Arc::clone(&leaked), Arc::clone(&realm));
    // Keeps the blobs of others, and asks for their passwords.
    let storage = serve(Arc::new(move |path, authorization| {
        if authorization.is_some() || path.starts_with("/token") {
            heard.store(true, std::sync::atomic::Ordering::SeqCst);
            return ok(r#"{"token":"t0k"}"#);
        }
        Said {
            status: "401 Unauthorized",
            headers: vec![(
                "WWW-Authenticate",
                format!("Bearer realm=\"{}\"", own.get().unwrap()),
            )],
            ..ok("")
        }
    }))
    .await;
    realm.set(format!("http://{storage}/token")).unwrap();
    let to = format!("http://{storage}/blob");
    let authority = registry(move || redirect(&to)).await;
    let both = RegistryPolicy::new(vec![authority.clone(), storage], vec![], vec![]).unwrap();
    let ann = Credentials {
        username: "ann".to_owned(),
        password: "pw".to_owned(),
    };
    let error = pull_as(&both, &format!("{authority}/app:1"), Some(ann)).await;
    assert_eq!(error.unwrap_err().code(), Code::Denied);
    assert!(!leaked.load(std::sync::atomic::Ordering::SeqCst));
}

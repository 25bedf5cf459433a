//! Authorization: scoped tokens, and token reviews with a fake API server.

use super::*;
use crate::router::authz::token::Secret;
use std::sync::Mutex;
use std::time::SystemTime;

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

/// Requests that the fake API server received.
type Asked = Arc<Mutex<Vec<Value>>>;

/// A fake API server. The user of the token `good` may reach `team/sb`, the user of `other` nothing.
fn cluster(asked: Asked) -> kube::Client {
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let asked = Arc::clone(&asked);
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut review: Value = serde_json::from_slice(&body).unwrap();
            asked.lock().unwrap().push(review.clone());
            let spec = &review["spec"];
            let status = match review["kind"].as_str().unwrap() {
                "TokenReview" => match spec["token"].as_str().unwrap() {
                    "down" => {
                        let failed = Response::builder().status(500);
                        return Ok::<_, BoxError>(failed.body(full("{}".to_owned())).unwrap());
                    }
                    token @ ("good" | "other") => json!({
                        "authenticated": true,
                        "user": {"username": token, "groups": ["g"], "extra": {"k": ["v"]}},
                    }),
                    _ => json!({"authenticated": false}),
                },
                _ => {
                    let wanted = &spec["resourceAttributes"];
                    let may = spec["user"] == "good"
                        && wanted["namespace"] == "team"
                        && wanted["name"] == "sb";
                    json!({"allowed": may})
                }
            };
            review["status"] = status;
            Ok(Response::builder()
                .status(201)
                .body(full(review.to_string()))
                .unwrap())
        }
    });
    kube::Client::new(service, "default")
}

async fn status(router: &Router, sandbox: &Sandbox, name: &str, token: Option<&str>) -> u16 {
    let mut request = sandbox.request().body(no_body()).unwrap();
    request
        .headers_mut()
        .insert("x-sandbox-id", name.parse().unwrap());
    if let Some(token) = token {
        request
            .headers_mut()
            .insert("authorization", format!("bearer {token}").parse().unwrap());
    }
    router.ask(request).await.status.as_u16()
}

#[tokio::test]
async fn token_reviews_decide_and_are_cached() {
    let asked = Asked::default();
    let flags = options(&[]);
    assert_eq!(
        flags.authz_mode,
        crate::router::AuthzMode::Tokenreview,
        "the default needs a token"
    );
    let authorizer = Authorizer::new(&flags, &cluster(Arc::clone(&asked))).unwrap();
    let (router, sandbox) = (
        Router::start_with(flags, authorizer).await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    router.knows("theirs", &sandbox);
    let count = || asked.lock().unwrap().len();
    assert_eq!(status(&router, &sandbox, "sb", None).await, 401);
    assert_eq!(status(&router, &sandbox, "sb", Some("bad")).await, 401);
    assert_eq!(status(&router, &sandbox, "sb", Some("down")).await, 503);
    assert_eq!(
        status(&router, &sandbox, "sb", Some(&"x".repeat(20_000))).await,
        401
    );
    assert_eq!(
        count(),
        2,
        "no token, and one that is too long, are not sent to the API server"
    );
    assert_eq!(status(&router, &sandbox, "sb", Some("good")).await, 200);
    let review = asked.lock().unwrap()[3].clone();
    let wanted = json!({
        "group": "agents.x-k8s.io", "resource": "sandboxes", "subresource": "proxy", "verb": "create",
        "namespace": "team", "name": "sb",
    });
    assert_eq!(review["spec"]["resourceAttributes"], wanted);
    assert_eq!(review["spec"]["groups"], json!(["g"]));
    assert_eq!(review["spec"]["extra"], json!({"k": ["v"]}));
    for _ in 0..5 {
        assert_eq!(status(&router, &sandbox, "sb", Some("good")).await, 200);
    }
    assert_eq!(count(), 4, "the cluster's word is kept for a while");
    assert_eq!(status(&router, &sandbox, "theirs", Some("good")).await, 403);
    assert_eq!(count(), 5, "whose token it is was known");
    assert_eq!(
        status(&router, &sandbox, "unknown", Some("good")).await,
        403,
        "not even whether it is there"
    );
    assert_eq!(status(&router, &sandbox, "sb", Some("other")).await, 403);
    assert_eq!(status(&router, &sandbox, "sb", Some("bad")).await, 401);
}

#[tokio::test]
async fn a_token_needs_one_of_the_audiences() {
    let flags = options(&["--authz-tokenreview-audiences=sandboxes"]);
    let asked = Asked::default();
    let authorizer = Authorizer::new(&flags, &cluster(Arc::clone(&asked))).unwrap();
    let (router, sandbox) = (
        Router::start_with(flags, authorizer).await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    // The fake API server returns no audiences.
    assert_eq!(status(&router, &sandbox, "sb", Some("good")).await, 401);
    assert_eq!(
        asked.lock().unwrap()[0]["spec"]["audiences"],
        json!(["sandboxes"])
    );
}

#[tokio::test]
async fn a_scoped_token_is_valid_for_one_sandbox() {
    let authorizer = Authorizer::Scoped(Secret::new(SECRET).unwrap());
    let (router, sandbox) = (
        Router::start_with(options(&[]), authorizer).await,
        Sandbox::mirror().await,
    );
    router.knows("sb", &sandbox);
    router.knows("theirs", &sandbox);
    let token = crate::router::mint(SECRET, "team", "sb", Duration::from_secs(60)).unwrap();
    assert_eq!(status(&router, &sandbox, "sb", Some(&token)).await, 200);
    assert_eq!(status(&router, &sandbox, "theirs", Some(&token)).await, 403);
    assert_eq!(status(&router, &sandbox, "sb", None).await, 401);
    assert_eq!(status(&router, &sandbox, "sb", Some("v1.x.y")).await, 401);
    let long_ago = SystemTime::now() - Duration::from_secs(120);
    let old = Secret::new(SECRET)
        .unwrap()
        .mint("team", "sb", Duration::from_secs(60), long_ago)
        .unwrap();
    assert_eq!(status(&router, &sandbox, "sb", Some(&old)).await, 401);
    for (name, value) in [
        ("x-sandbox-pod-ip", "127.0.0.1"),
        ("x-sandbox-uid", "uid-sb"),
    ] {
        let request = sandbox
            .request()
            .header(name, value)
            .header("authorization", format!("Bearer {token}"));
        assert_eq!(
            router.ask(request.body(no_body()).unwrap()).await.status,
            403,
            "{name}"
        );
    }
}

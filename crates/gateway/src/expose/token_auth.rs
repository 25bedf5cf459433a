//! Token authentication of requests to exposed services: which service, and whether the token is right.

use super::base::BaseUrl;
use super::{Answer, plain_text};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT, AUTHORIZATION, COOKIE, HOST, HeaderMap, HeaderValue, LOCATION, REFERRER_POLICY,
    SET_COOKIE, UPGRADE,
};
use hyper::{Method, Request, StatusCode};
use k8e_engine::{EXPOSE_PATH, OpenPort, Sessions};
use k8e_model::{Port, ServiceLabel, ServiceToken, SessionId};

/// Name of the token as a query parameter and as a cookie.
pub(super) const TOKEN: &str = "k8e_token";

/// The cookie of a service with an https origin of its own. Browsers take it from that very origin only: pages of other
/// services, which are of the same site, cannot set one that this service is sent.
const HOST_TOKEN: &str = "__Host-k8e_token";

/// Name of the token as a header.
pub(super) const TOKEN_HEADER: &str = "x-k8e-token";

/// Tokens that one request may try: one of each kind, and cookies of paths within each other.
const TOKENS_MAX: usize = 8;

/// An authenticated request for a service.
#[derive(Debug)]
pub(super) struct Visit {
    /// What the service's path begins with, as visitors see it; no slash at its end. Empty where it has a host of its own.
    pub(super) prefix: String,
    /// Path and query as the service sees them.
    pub(super) target: String,
    /// The token, when it is in the URL.
    in_url: Option<ServiceToken>,
    /// Whether `authorization` has the token; otherwise that header is passed on to the service.
    pub(super) by_bearer: bool,
}

/// The service that a URL names, and the rest of the path.
#[derive(Debug, PartialEq, Eq)]
struct Place<'a> {
    session: SessionId,
    port: Port,
    rest: &'a str,
}

/// Authenticates a request. None when there is no such service, or no right token.
pub(super) fn admit(
    sessions: &Sessions,
    base: &BaseUrl,
    request: &Request<Incoming>,
) -> Option<(Visit, OpenPort)> {
    let uri = request.uri();
    let place = if base.is_wildcard() {
        place_by_host(base, request)?
    } else {
        place(base, uri.path())?
    };
    let (session, port) = (&place.session, place.port);
    let (query, in_url) = split_query(uri.query());
    let bearer = bearer(request.headers());
    let open = |tokens: &[ServiceToken]| sessions.open_port(session, port, tokens);
    let by_bearer = bearer.and_then(|bearer| open(&[bearer]));
    let by_header = open(&in_headers(base, request));
    let right = |token: ServiceToken| Some((open(std::slice::from_ref(&token))?, token));
    let (by_url, in_url) = in_url.into_iter().find_map(right).unzip();
    let visit = Visit {
        prefix: if base.is_wildcard() {
            String::new()
        } else {
            format!("{}{EXPOSE_PATH}/{session}/{port}", base.path())
        },
        target: target(place.rest, &query),
        in_url,
        by_bearer: by_bearer.is_some(),
    };
    Some((visit, by_url.or(by_bearer).or(by_header)?))
}

/// Whether a browser shows the answer as a page (it accepts HTML). A program, or a browser that loads an image, is not
/// redirected.
fn is_page(request: &Request<Incoming>) -> bool {
    let accepts = request.headers().get_all(ACCEPT).iter();
    let mut accepts = accepts.filter_map(|value| value.to_str().ok());
    request.method() == Method::GET
        && !request.headers().contains_key(UPGRADE)
        && accepts.any(|value| value.to_ascii_lowercase().contains("text/html"))
}

// === impl Visit ===

impl Visit {
    /// Redirects a browser to the same URL without the token, which becomes a cookie: so the token is in no history, in
    /// no `referer`, and not in what people copy from the address bar.
    pub(super) fn without_token(
        &self,
        base: &BaseUrl,
        request: &Request<Incoming>,
    ) -> Option<Answer> {
        let token = self.in_url.as_ref().filter(|_| is_page(request))?;
        let Self { prefix, target, .. } = self;
        let secure = if base.is_https() { "; Secure" } else { "" };
        let token = token.reveal();
        let name = cookie_name(base);
        let cookie = format!("{name}={token}; Path={prefix}/; HttpOnly; SameSite=Lax{secure}");
        // Without an origin, `//name/` would lead to another host.
        let origin = match host(request.headers()) {
            Some(host) if base.is_wildcard() => format!("{}://{host}", base.scheme()),
            _ => String::new(),
        };
        let (Ok(location), Ok(mut cookie)) = (
            HeaderValue::from_str(&format!("{origin}{prefix}{target}")),
            HeaderValue::from_str(&cookie),
        ) else {
            return None;
        };
        cookie.set_sensitive(true);
        let mut answer = plain_text(StatusCode::SEE_OTHER, "go on without the token");
        let headers = answer.headers_mut();
        headers.insert(LOCATION, location);
        headers.insert(SET_COOKIE, cookie);
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        Some(answer)
    }
}

/// The service by its host name (wildcard base URL); the path is all the service's.
fn place_by_host<'a>(base: &BaseUrl, request: &'a Request<Incoming>) -> Option<Place<'a>> {
    let ServiceLabel { session, port } = base.service(host(request.headers())?)?;
    Some(Place {
        session,
        port,
        rest: request.uri().path(),
    })
}

/// The `host` header. None when there are several: a proxy in front might read another one.
fn host(headers: &HeaderMap) -> Option<&str> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next()?.to_str().ok()?;
    hosts.next().is_none().then_some(host)
}

fn place<'a>(base: &BaseUrl, path: &'a str) -> Option<Place<'a>> {
    // A proxy in front may strip its part of the path, or not.
    let below = path.strip_prefix(base.path()).unwrap_or(path);
    let below = [below, path]
        .into_iter()
        .find_map(|path| path.strip_prefix(EXPOSE_PATH)?.strip_prefix('/'))?;
    let (session, below) = below.split_once('/')?;
    let (port, rest) = match below.find('/') {
        Some(at) => below.split_at(at),
        None => (below, "/"),
    };
    let number = port.parse::<u16>().ok()?;
    // One spelling only: a proxy in front may take two spellings for one service.
    if number.to_string() != port {
        return None;
    }
    Some(Place {
        session: session.parse().ok()?,
        port: Port::new(number.into()).ok()?,
        rest,
    })
}

/// The query without tokens, and the tokens.
fn split_query(query: Option<&str>) -> (String, Vec<ServiceToken>) {
    let mut kept = Vec::new();
    let mut tokens = Vec::new();
    for pair in query.into_iter().flat_map(|query| query.split('&')) {
        match pair.split_once('=') {
            Some((TOKEN, value)) if tokens.len() < TOKENS_MAX => {
                tokens.extend(ServiceToken::parse(value.as_bytes()));
            }
            Some((TOKEN, _)) => {}
            _ => kept.push(pair),
        }
    }
    (kept.join("&"), tokens)
}

fn target(rest: &str, query: &str) -> String {
    match query {
        "" => rest.to_owned(),
        query => format!("{rest}?{query}"),
    }
}

fn bearer(headers: &HeaderMap) -> Option<ServiceToken> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked(b"bearer ".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer ");
    is_bearer.then(|| ServiceToken::parse(token.trim_ascii()))?
}

/// The tokens in our header and our cookie.
fn in_headers(base: &BaseUrl, request: &Request<Incoming>) -> Vec<ServiceToken> {
    let headers = request.headers();
    let own = headers.get(TOKEN_HEADER).into_iter();
    let own = own.map(HeaderValue::as_bytes);
    let cookies = token_cookies(headers, cookie_name(base));
    // Browsers send cookies with requests of other services' pages too: those are of the same site.
    let cookies = cookies.filter(|_| !base.is_wildcard() || is_of_own_origin(base, request));
    let tokens = own.chain(cookies).take(TOKENS_MAX);
    tokens.filter_map(ServiceToken::parse).collect()
}

/// The name of the token's cookie.
fn cookie_name(base: &BaseUrl) -> &'static str {
    if base.is_wildcard() && base.is_https() {
        HOST_TOKEN
    } else {
        TOKEN
    }
}

/// Whether a cookie is ours, under any base.
pub(super) fn is_token_cookie(name: &[u8]) -> bool {
    [TOKEN, HOST_TOKEN].map(str::as_bytes).contains(&name)
}

fn token_cookies<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    let cookies = headers.get_all(COOKIE).into_iter();
    cookies
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b';'))
        .filter_map(move |pair| pair.trim_ascii().strip_prefix(name.as_bytes()))
        .filter_map(|rest| rest.strip_prefix(b"="))
}

/// Whether the request does not come from a page of another origin, as far as the browser says; links to a page are fine.
fn is_of_own_origin(base: &BaseUrl, request: &Request<Incoming>) -> bool {
    let headers = request.headers();
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    if let Some(origin) = text("origin") {
        let own = host(headers).map(|host| format!("{}://{host}", base.scheme()));
        return own.is_some_and(|own| own.eq_ignore_ascii_case(origin));
    }
    let is_link = request.method() == Method::GET
        && text("sec-fetch-mode") == Some("navigate")
        && text("sec-fetch-dest") == Some("document");
    matches!(text("sec-fetch-site"), None | Some("same-origin" | "none")) || is_link
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(base: &str, path: &str) -> Option<(String, u16, String)> {
        let place = place(&base.parse().unwrap(), path)?;
        let session = place.session.to_string();
        Some((session, place.port.get(), place.rest.to_owned()))
    }

    #[test]
    fn places_have_one_spelling() {
        let (plain, below) = ("http://a", "http://a/x/y");
        let at = |rest: &str| Some(("s1".to_owned(), 80, rest.to_owned()));
        assert_eq!(placed(plain, "/k8e/expose/s1/80/"), at("/"));
        assert_eq!(placed(plain, "/k8e/expose/s1/80"), at("/"));
        assert_eq!(placed(plain, "/k8e/expose/s1/80//a/../b"), at("//a/../b"));
        assert_eq!(placed(below, "/x/y/k8e/expose/s1/80/a"), at("/a"));
        assert_eq!(placed(below, "/k8e/expose/s1/80/a"), at("/a"));
        for bad in [
            "/",
            "/k8e/expose",
            "/k8e/expose/",
            "/k8e/expose/s1",
            "/k8e/expose/s1/",
            "/k8e/expose/s1/0/",
            "/k8e/expose/s1/080/",
            "/k8e/expose/s1/+80/",
            "/k8e/expose/s1/65536/",
            "/k8e/expose/S1/80/",
            "/k8e/expose//80/",
            "/k8e/expose/../80/",
            "/k8e/exposes1/80/",
            "//k8e/expose/s1/80/",
        ] {
            assert_eq!(placed(plain, bad), None, "{bad}");
        }
    }

    #[test]
    fn a_query_keeps_all_but_tokens() {
        let token = ServiceToken::random();
        let text = token.reveal();
        let split = |query: &str| split_query(Some(query));
        assert_eq!(split_query(None), (String::new(), vec![]));
        assert_eq!(split("a=1&&b"), ("a=1&&b".to_owned(), vec![]));
        let query = format!("a=1&k8e_token={text}&b=%20&k8e_token=no&k8e_tokens=2");
        assert_eq!(
            split(&query),
            ("a=1&b=%20&k8e_tokens=2".to_owned(), vec![token])
        );
        let many = vec![format!("k8e_token={text}"); 100].join("&");
        let (rest, tokens) = split(&many);
        assert_eq!((rest.as_str(), tokens.len()), ("", TOKENS_MAX));
    }

    #[test]
    fn tokens_are_found_in_headers() {
        let token = ServiceToken::random();
        let text = token.reveal();
        let mut headers = HeaderMap::new();
        let cookies = |headers: &HeaderMap| -> Vec<_> {
            let cookies = token_cookies(headers, TOKEN);
            cookies.filter_map(ServiceToken::parse).collect()
        };
        assert!(bearer(&headers).is_none() && cookies(&headers).is_empty());
        headers.insert(AUTHORIZATION, format!("bEARER {text}").parse().unwrap());
        assert_eq!(bearer(&headers), Some(token.clone()));
        headers.insert(AUTHORIZATION, "Bearer something-else".parse().unwrap());
        assert_eq!(bearer(&headers), None);
        headers.append(COOKIE, format!("a=b;  {TOKEN}={text} ;c").parse().unwrap());
        headers.append(COOKIE, format!("{TOKEN}x={text}").parse().unwrap());
        headers.append(COOKIE, format!("{HOST_TOKEN}={text}").parse().unwrap());
        assert_eq!(cookies(&headers), [token]);
    }
}

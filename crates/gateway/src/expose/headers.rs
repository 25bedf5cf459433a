//! Headers that the reverse proxy removes, rewrites and adds: a service must not learn the token, and its answers must not
//! affect anything outside its own path.

use super::base::BaseUrl;
use super::token_auth::{TOKEN, Visit, is_token_cookie};
use hyper::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderName,
    HeaderValue, LOCATION, REFERER, SET_COOKIE, TRANSFER_ENCODING, UPGRADE,
};
use k8e_net::hop_by_hop;
use std::net::IpAddr;

/// Headers of answers that are about a whole origin, which services share.
const ORIGIN_WIDE: [&str; 16] = [
    "accept-ch",
    "activate-storage-access",
    "alt-svc",
    "clear-site-data",
    "critical-ch",
    "expect-ct",
    "nel",
    "origin-agent-cluster",
    "public-key-pins",
    "public-key-pins-report-only",
    "report-to",
    "reporting-endpoints",
    "service-worker-allowed",
    "set-login",
    "strict-transport-security",
    "use-as-dictionary",
];

/// Prefix of headers that are ours: never passed on.
const OWN_PREFIX: &str = "x-k8e-";

/// Makes a visitor's headers those of the request to the service.
pub(super) fn to_service(
    headers: &mut HeaderMap,
    visit: &Visit,
    base: &BaseUrl,
    visitor: IpAddr,
    upgrade: bool,
) {
    // A chunked message has no other length: two lengths are how requests are smuggled.
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    hop_by_hop::remove(headers, &[]);
    // `Expect: 100-continue` is answered here, when the body is read.
    headers.remove(EXPECT);
    let own = |name: &&HeaderName| name.as_str().starts_with(OWN_PREFIX);
    let own: Vec<_> = headers.keys().filter(own).cloned().collect();
    for name in own {
        headers.remove(name);
    }
    if visit.by_bearer {
        headers.remove(AUTHORIZATION);
    }
    let names_token = |value: &HeaderValue| contains(value.as_bytes(), TOKEN.as_bytes());
    if headers.get(REFERER).is_some_and(names_token) {
        headers.remove(REFERER);
    }
    without_own_cookie(headers);
    forwarded(headers, visit, base, visitor);
    // One request per connection to the service.
    let connection = if upgrade { "upgrade" } else { "close" };
    headers.insert(CONNECTION, HeaderValue::from_static(connection));
    if upgrade {
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    }
}

/// Makes a service's headers those of the answer to a visitor.
pub(super) fn to_visitor(headers: &mut HeaderMap, visit: &Visit, host: Option<&HeaderValue>) {
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    hop_by_hop::remove(headers, &[]);
    for name in ORIGIN_WIDE {
        headers.remove(name);
    }
    let cookies: Vec<_> = headers.get_all(SET_COOKIE).into_iter().cloned().collect();
    headers.remove(SET_COOKIE);
    for cookie in cookies {
        if let Some(cookie) = own_path_only(cookie.as_bytes(), &visit.prefix) {
            headers.append(SET_COOKIE, cookie);
        }
    }
    if let Some(location) = headers.get(LOCATION)
        && let Some(location) = within(location.as_bytes(), &visit.prefix, host)
    {
        headers.insert(LOCATION, location);
    }
}

fn without_own_cookie(headers: &mut HeaderMap) {
    let given: Vec<_> = headers.get_all(COOKIE).into_iter().cloned().collect();
    headers.remove(COOKIE);
    for value in given {
        let pairs = value.as_bytes().split(|byte| *byte == b';');
        let kept: Vec<_> = pairs
            .map(<[u8]>::trim_ascii)
            .filter(|pair| !pair.is_empty() && !is_token_cookie(cookie_name(pair)))
            .collect();
        if let Ok(kept) = HeaderValue::from_bytes(&kept.join(b"; ".as_slice()))
            && !kept.is_empty()
        {
            headers.append(COOKIE, kept);
        }
    }
}

/// `X-Forwarded-*`: the visitor's address, the host, the protocol and the path's prefix.
fn forwarded(headers: &mut HeaderMap, visit: &Visit, base: &BaseUrl, visitor: IpAddr) {
    let visitor = visitor.to_canonical();
    let before = headers.get("x-forwarded-for");
    let before = before.and_then(|before| before.to_str().ok());
    let visitors = match before {
        Some(before) => format!("{before}, {visitor}"),
        None => visitor.to_string(),
    };
    let host = headers.get(HOST).cloned();
    let text = |text: &str| HeaderValue::from_str(text).ok();
    for (name, value) in [
        ("x-forwarded-for", text(&visitors)),
        ("x-forwarded-host", host),
        (
            "x-forwarded-prefix",
            text(&visit.prefix).filter(|prefix| !prefix.is_empty()),
        ),
        ("x-forwarded-proto", text(base.scheme())),
    ] {
        headers.remove(name);
        if let Some(value) = value {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// The cookie limited to this service's path; none when it would set our token's cookie.
fn own_path_only(cookie: &[u8], prefix: &str) -> Option<HeaderValue> {
    let mut parts = cookie.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    let pair = parts.next()?;
    if is_token_cookie(cookie_name(pair)) {
        return None;
    }
    let mut kept = pair.to_vec();
    let mut path = format!("{prefix}/").into_bytes();
    for attribute in parts {
        let (name, value) = match attribute.iter().position(|byte| *byte == b'=') {
            Some(at) => (&attribute[..at], attribute[at + 1..].trim_ascii()),
            None => (attribute, &b""[..]),
        };
        match name.trim_ascii().to_ascii_lowercase().as_slice() {
            b"domain" => {}
            b"path" if value.starts_with(format!("{prefix}/").as_bytes()) => path = value.to_vec(),
            b"path" if value.starts_with(b"/") => {
                path = [prefix.as_bytes(), value].concat();
            }
            b"path" => {}
            _ => {
                kept.extend_from_slice(b"; ");
                kept.extend_from_slice(attribute);
            }
        }
    }
    kept.extend_from_slice(b"; Path=");
    kept.extend_from_slice(&path);
    HeaderValue::from_bytes(&kept).ok()
}

/// Rewrites a `Location` on the service's own host to the path that visitors see. None leaves it as it is.
fn within(location: &[u8], prefix: &str, host: Option<&HeaderValue>) -> Option<HeaderValue> {
    let local = |url: &[u8]| -> Option<Vec<u8>> {
        let rest = [&b"http://"[..], b"https://"]
            .into_iter()
            .find_map(|scheme| url.strip_prefix(scheme))?;
        let rest = rest.strip_prefix(host?.as_bytes())?;
        match rest.first() {
            None => Some(b"/".to_vec()),
            Some(b'/') => Some(rest.to_vec()),
            Some(_) => None,
        }
    };
    let path = match location {
        [b'/', b'/', ..] => return None,
        [b'/', ..] => location.to_vec(),
        url => local(url)?,
    };
    // A service that knows its prefix has put it there already.
    if path.starts_with(format!("{prefix}/").as_bytes()) || path == prefix.as_bytes() {
        return HeaderValue::from_bytes(&path).ok();
    }
    HeaderValue::from_bytes(&[prefix.as_bytes(), &path].concat()).ok()
}

/// As browsers parse it: what is before the first `=`.
fn cookie_name(pair: &[u8]) -> &[u8] {
    let name = pair.split(|byte| *byte == b'=').next().unwrap_or(pair);
    name.trim_ascii()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFIX: &str = "/k8e/expose/s1/80";

    fn cookie(text: &str) -> Option<String> {
        let value = own_path_only(text.as_bytes(), PREFIX)?;
        Some(value.to_str().unwrap().to_owned())
    }

    #[test]
    fn cookies_stay_below_their_service() {
        for (said, kept) in [
            ("a=b", "a=b; Path=/k8e/expose/s1/80/"),
            ("a=b; Path=/", "a=b; Path=/k8e/expose/s1/80/"),
            (
                "a=b;PATH = /x ;HttpOnly",
                "a=b; HttpOnly; Path=/k8e/expose/s1/80/x",
            ),
            ("a=b; path=/; path=/y", "a=b; Path=/k8e/expose/s1/80/y"),
            ("a=b; path=", "a=b; Path=/k8e/expose/s1/80/"),
            ("a=b; path=x", "a=b; Path=/k8e/expose/s1/80/"),
            (
                "a=b; Path=/k8e/expose/s1/80/z; Domain=.example.com; Secure",
                "a=b; Secure; Path=/k8e/expose/s1/80/z",
            ),
            (
                "a=b; Path=/k8e/expose/s2/80/",
                "a=b; Path=/k8e/expose/s1/80/k8e/expose/s2/80/",
            ),
            (
                "a=b; Path=/k8e/expose/s1/800/",
                "a=b; Path=/k8e/expose/s1/80/k8e/expose/s1/800/",
            ),
        ] {
            assert_eq!(cookie(said).as_deref(), Some(kept), "{said}");
        }
        assert_eq!(cookie("k8e_token=x; Path=/"), None);
        assert_eq!(cookie(" k8e_token =x"), None);
        assert_eq!(cookie("__Host-k8e_token=x; Secure; Path=/"), None);
    }

    #[test]
    fn places_stay_below_their_service() {
        let host = HeaderValue::from_static("p.example:81");
        let at = |said: &str| {
            let value = within(said.as_bytes(), PREFIX, Some(&host))?;
            Some(value.to_str().unwrap().to_owned())
        };
        for (said, kept) in [
            ("/", Some("/k8e/expose/s1/80/")),
            ("/a?b=/c", Some("/k8e/expose/s1/80/a?b=/c")),
            ("/k8e/expose/s1/80/a", Some("/k8e/expose/s1/80/a")),
            ("http://p.example:81/a", Some("/k8e/expose/s1/80/a")),
            ("https://p.example:81", Some("/k8e/expose/s1/80/")),
            ("http://p.example:810/a", None),
            ("http://other.example/a", None),
            ("//other.example/a", None),
            ("a/b", None),
            ("", None),
        ] {
            assert_eq!(at(said).as_deref(), kept, "{said}");
        }
    }

    #[test]
    fn where_a_service_has_a_host_its_paths_are_its_own() {
        let cookie = |said: &str| {
            let value = own_path_only(said.as_bytes(), "").unwrap();
            value.to_str().unwrap().to_owned()
        };
        assert_eq!(cookie("a=b"), "a=b; Path=/");
        assert_eq!(cookie("a=b; Path=/x; Domain=example"), "a=b; Path=/x");
        let host = HeaderValue::from_static("80-s1.example");
        for (said, kept) in [
            ("/", Some("/")),
            ("/a", Some("/a")),
            ("http://80-s1.example/a", Some("/a")),
            ("http://80-s2.example/a", None),
        ] {
            let kept = kept.map(HeaderValue::from_static);
            assert_eq!(within(said.as_bytes(), "", Some(&host)), kept, "{said}");
        }
    }

    #[test]
    fn our_cookie_is_not_passed_on() {
        let mut headers = HeaderMap::new();
        let given = HeaderValue::from_static("a=b; k8e_token=1;__Host-k8e_token=2 ; c=d=e");
        headers.append(COOKIE, given);
        headers.append(COOKIE, HeaderValue::from_static("k8e_token=3"));
        without_own_cookie(&mut headers);
        let left: Vec<_> = headers.get_all(COOKIE).into_iter().collect();
        assert_eq!(left, ["a=b; c=d=e"]);
    }
}

//! Users of a sandbox in E2B's terms: `user`, the default, and `root`; their homes; paths relative to them.

use super::error::Failure;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use k8e_engine::FileOwner;
use k8e_model::GuestPath;

/// The user that a call is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum User {
    User,
    Root,
}

// === impl User ===

impl User {
    /// The user of an RPC: the name in `Authorization: Basic`, else the default.
    pub(super) fn of_headers(headers: &HeaderMap) -> Result<Self, Failure> {
        let Some(value) = headers.get(AUTHORIZATION) else {
            return Ok(Self::User);
        };
        let decoded = value
            .to_str()
            .ok()
            .and_then(|text| text.strip_prefix("Basic "))
            .and_then(|text| STANDARD.decode(text.trim()).ok())
            .and_then(|bytes| String::from_utf8(bytes).ok())
            .ok_or_else(|| Failure::unauthenticated("invalid username: not Basic authorization"))?;
        Self::named(
            decoded
                .split_once(':')
                .map_or(decoded.as_str(), |(name, _)| name),
        )
    }

    /// By name; empty is the default.
    pub(super) fn named(name: &str) -> Result<Self, Failure> {
        match name {
            "" | "user" => Ok(Self::User),
            "root" => Ok(Self::Root),
            other => {
                let shown: String = other.chars().take(64).collect();
                Err(Failure::unauthenticated(format!(
                    "invalid username: '{shown}'"
                )))
            }
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Root => "root",
        }
    }

    pub(super) fn owner(self) -> FileOwner {
        match self {
            Self::User => FileOwner::User,
            Self::Root => FileOwner::Root,
        }
    }

    pub(super) fn home(self) -> &'static str {
        match self {
            Self::User => "/home/user",
            Self::Root => "/root",
        }
    }

    /// A path as a client gives it: absolute, below `~`, or relative to the home directory.
    pub(super) fn absolute(self, path: &str) -> String {
        let home = self.home();
        match path.strip_prefix('~') {
            Some("") => home.to_owned(),
            Some(rest) if rest.starts_with('/') => format!("{home}{rest}"),
            _ if path.starts_with('/') => path.to_owned(),
            _ => format!("{home}/{path}"),
        }
    }

    pub(super) fn path(self, path: &str) -> Result<GuestPath, Failure> {
        Ok(GuestPath::parse_absolute(self.absolute(path).as_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_relative_to_the_home() {
        assert_eq!(User::User.absolute("a/b"), "/home/user/a/b");
        assert_eq!(User::Root.absolute("~/a"), "/root/a");
        assert_eq!(User::Root.absolute("~"), "/root");
        assert_eq!(User::User.absolute("/etc"), "/etc");
        assert_eq!(User::User.absolute("~x"), "/home/user/~x");
        assert_eq!(User::User.absolute(""), "/home/user/");
    }

    #[test]
    fn only_two_users_are_known() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            User::of_headers(&headers).map_err(|failure| failure.message)
        };
        assert_eq!(of("Basic cm9vdDo=").unwrap(), User::Root);
        assert_eq!(of("Basic dXNlcjo=").unwrap(), User::User);
        assert!(of("Basic bm9ib2R5Og==").unwrap_err().contains("'nobody'"));
        assert!(of("Bearer x").is_err());
        assert_eq!(User::of_headers(&HeaderMap::new()).unwrap(), User::User);
    }
}

//! The languages that `run` knows, and which interpreter each one needs.

use crate::Error;
use std::str::FromStr;

/// Runs the file named by the first argument as the main module.
const PYTHON_START: &str = "import sys; sys.argv = sys.argv[1:]; __file__ = sys.argv[0]; \
     exec(compile(open(__file__, 'rb').read(), __file__, 'exec'))";

/// A language of `run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Language {
    /// The default.
    #[default]
    Bash,
    /// `python3`.
    Python,
    /// `node`.
    Node,
    /// TypeScript through `tsx`.
    Ts,
}

// === impl Language ===

impl Language {
    /// Every language, in the order help shows them.
    pub const ALL: [Self; 4] = [Self::Bash, Self::Python, Self::Node, Self::Ts];

    /// As it is written in requests and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Python => "python",
            Self::Node => "node",
            Self::Ts => "ts",
        }
    }

    /// The interpreter and its arguments; the code's file comes last.
    pub fn interpreter(self) -> &'static [&'static str] {
        match self {
            Self::Bash => &["bash"],
            // Unbuffered, so that a stream shows output when it is written. As `-c`, so that imports
            // come from the working directory and not from where the file is.
            Self::Python => &["python3", "-u", "-c", PYTHON_START],
            Self::Node => &["node"],
            Self::Ts => &["tsx"],
        }
    }

    /// Of the code's file: tsx and node go by it.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Bash => "sh",
            Self::Python => "py",
            Self::Node => "js",
            Self::Ts => "ts",
        }
    }

    /// Whether the code's file must be in the working directory: Node resolves relative imports
    /// from where the file is.
    pub fn file_in_cwd(self) -> bool {
        match self {
            Self::Node | Self::Ts => true,
            Self::Bash | Self::Python => false,
        }
    }

    /// How to get the interpreter into the `host` template.
    pub fn install_hint(self) -> &'static str {
        match self {
            Self::Bash => "install bash on the host",
            Self::Python => {
                "install python3 on the host under /usr (for example `apt-get install python3`)"
            }
            Self::Node => {
                "install Node.js on the host under /usr (for example `apt-get install nodejs`)"
            }
            Self::Ts => "install tsx on the host under /usr (`npm install --global tsx`)",
        }
    }
}

impl FromStr for Language {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "" | "bash" | "sh" | "shell" => Ok(Self::Bash),
            "python" | "python3" | "py" => Ok(Self::Python),
            "node" | "nodejs" | "js" | "javascript" => Ok(Self::Node),
            "ts" | "typescript" => Ok(Self::Ts),
            _ => Err(Error::invalid(format!(
                "language {:?} is not known: use bash, python, node or ts",
                text.chars().take(32).collect::<String>()
            ))),
        }
    }
}

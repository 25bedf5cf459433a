//! Templates: their names.

use k8e_model::{Error, TemplateName};

/// The template that a call names.
pub fn template_name(text: &str) -> Result<TemplateName, Error> {
    text.parse()
}

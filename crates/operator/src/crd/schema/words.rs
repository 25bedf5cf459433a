//! Descriptions, as short as `kubectl explain` needs them.
//!
//! Those of pods are long, and there are thousands: with all of it, a definition is larger than the annotation in which
//! `kubectl apply` keeps what it applied (256 KiB), and could only be applied with `--server-side`.

use serde_json::Value;

/// What ends with a full stop and does not end a sentence.
const ABBREVIATIONS: [&str; 4] = ["e.g", "i.e", "etc", "vs"];

/// Leaves the first sentence of every description.
pub(super) fn shorten(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            // A property may itself be called `description`: that is no string.
            if let Some(Value::String(text)) = object.get_mut("description") {
                *text = first_sentence(text).to_owned();
            }
            object.values_mut().for_each(shorten);
        }
        Value::Array(items) => items.iter_mut().for_each(shorten),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn first_sentence(text: &str) -> &str {
    let text = text.trim();
    let paragraph = text.split("\n\n").next().unwrap_or(text).trim_end();
    let stops = paragraph
        .match_indices(". ")
        .chain(paragraph.match_indices(".\n"));
    let ends = stops.filter(|(at, _)| {
        let before = &paragraph[..*at];
        !ABBREVIATIONS
            .iter()
            .any(|abbreviation| before.ends_with(abbreviation))
    });
    match ends.map(|(at, _)| at).min() {
        Some(at) => &paragraph[..=at],
        None => paragraph,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_sentence_is_left() {
        assert_eq!(first_sentence("One. Two."), "One.");
        assert_eq!(
            first_sentence("A list, e.g. of pods. More"),
            "A list, e.g. of pods."
        );
        assert_eq!(first_sentence("No end\n\nMore."), "No end");
        assert_eq!(
            first_sentence("Version 1.2 is meant.\nMore."),
            "Version 1.2 is meant."
        );
        assert_eq!(first_sentence(""), "");
    }

    #[test]
    fn properties_of_that_name_stay() {
        let mut schema = json!({"description": "A. B.", "properties": {"description": {"description": "C. D."}}});
        shorten(&mut schema);
        let short =
            json!({"description": "A.", "properties": {"description": {"description": "C."}}});
        assert_eq!(schema, short);
    }
}

//! Shortens descriptions in schemas to their first sentence.
//!
//! The descriptions of PodSpec are long. With all of them, a definition exceeds 256 KiB, the limit of the annotation in
//! which `kubectl apply` stores what it applied, and could only be applied with `--server-side`.

use serde_json::Value;

/// Abbreviations whose full stop does not end a sentence.
const ABBREVIATIONS: [&str; 4] = ["e.g", "i.e", "etc", "vs"];

/// Reduces every description to its first sentence.
pub(super) fn shorten(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            // A property may be named `description`; that is not a string.
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
    fn descriptions_are_cut_to_the_first_sentence() {
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
    fn properties_named_description_are_kept() {
        let mut schema = json!({"description": "A. B.", "properties": {"description": {"description": "C. D."}}});
        shorten(&mut schema);
        let short =
            json!({"description": "A.", "properties": {"description": {"description": "C."}}});
        assert_eq!(schema, short);
    }
}

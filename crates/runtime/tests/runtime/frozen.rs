//! Wire compatibility of sandboxd's process API: our proto is compared with the descriptor in the Python wheel of
//! agent-sandbox's client.

use prost::Message as _;
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

const OURS: &[u8] = include_bytes!("../../src/gen/process.v1.bin");

/// Transcribed from the descriptor in k8s_agent_sandbox 1.0.8.
const FROZEN: &str = include_str!("process.v1.txt");

#[test]
fn the_process_api_is_that_of_the_client() {
    let set = FileDescriptorSet::decode(OURS).unwrap();
    let file = set
        .file
        .iter()
        .find(|file| file.package() == "process.v1")
        .unwrap();
    let mut lines = Vec::new();
    for service in &file.service {
        for method in &service.method {
            let stream = if method.server_streaming() {
                "stream "
            } else {
                ""
            };
            lines.push(format!(
                "rpc {}.{} ({}) returns ({stream}{})",
                service.name(),
                method.name(),
                method.input_type(),
                method.output_type(),
            ));
        }
    }
    lines.extend(file.message_type.iter().flat_map(fields));
    for kind in &file.enum_type {
        let value = |value: &prost_types::EnumValueDescriptorProto| {
            format!("enum {}.{} = {}", kind.name(), value.name(), value.number())
        };
        lines.extend(kind.value.iter().map(value));
    }
    let have = lines.join("\n");
    assert!(
        have == FROZEN.trim_end(),
        "proto/process/v1 is not what clients of agent-sandbox speak. Undo the change, or, for something \
         new that they have too, add it to crates/runtime/tests/runtime/process.v1.txt. It says now:\n{have}"
    );
}

/// Fields with their numbers; a message without fields is a line, too.
fn fields(message: &DescriptorProto) -> Vec<String> {
    let field = |field: &FieldDescriptorProto| {
        let kind = match field.type_name() {
            "" => format!("{:?}", field.r#type()).to_lowercase(),
            name => name.to_owned(),
        };
        let oneof = field.oneof_index.map_or("", |index| {
            message.oneof_decl[usize::try_from(index).unwrap()].name()
        });
        format!(
            "{}.{} = {} {:?} {kind} {oneof}",
            message.name(),
            field.name(),
            field.number(),
            field.label(),
        )
        .trim_end()
        .to_owned()
    };
    let mut lines: Vec<String> = message.field.iter().map(field).collect();
    if lines.is_empty() {
        lines.push(format!("message {}", message.name()));
    }
    lines.extend(message.nested_type.iter().flat_map(fields));
    lines
}

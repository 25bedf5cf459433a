//! Wire compatibility of the `sandbox.v1` API, whose clients are deployed: the proto is compared with a
//! description that a person checked.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet,
    MethodDescriptorProto,
};

const FROZEN: &str = include_str!("sandbox.v1.txt");

#[test]
fn the_api_of_k8e_is_as_it_was() {
    let set = FileDescriptorSet::decode(k8e_api::sandbox_v1::FILE_DESCRIPTOR_SET).unwrap();
    let file = set.file.first().unwrap();
    let mut lines = vec![format!("{} {}", file.syntax(), file.package())];
    for service in &file.service {
        let name = service.name();
        lines.extend(service.method.iter().map(|method| rpc(name, method)));
    }
    lines.extend(file.message_type.iter().flat_map(fields));
    lines.extend(file.enum_type.iter().flat_map(values));
    let have = lines.join("\n");
    assert!(
        have == FROZEN.trim_end(),
        "proto/sandbox/v1 is not what clients of K8E speak. Undo the change, or, for something new \
         that K8E has too, add it to crates/api/tests/frozen/sandbox.v1.txt. It says now:\n{have}"
    );
}

fn rpc(service: &str, method: &MethodDescriptorProto) -> String {
    let stream = |is: bool| if is { "stream " } else { "" };
    format!(
        "rpc {service}.{} ({}{}) returns ({}{})",
        method.name(),
        stream(method.client_streaming()),
        short(method.input_type()),
        stream(method.server_streaming()),
        short(method.output_type()),
    )
}

/// Fields by their numbers; a message without any is a line too.
fn fields(message: &DescriptorProto) -> Vec<String> {
    let mut fields: Vec<_> = message.field.iter().collect();
    fields.sort_by_key(|field| field.number());
    let mut lines: Vec<_> = fields.into_iter().map(|one| field(message, one)).collect();
    if lines.is_empty() {
        lines.push(format!("message {}", message.name()));
    }
    lines
}

fn field(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let of = |field: &FieldDescriptorProto| {
        if [Type::Message, Type::Enum].contains(&field.r#type()) {
            return short(field.type_name()).to_owned();
        }
        format!("{:?}", field.r#type()).to_lowercase()
    };
    let entry = message.nested_type.iter().find(|nested| {
        nested
            .options
            .as_ref()
            .is_some_and(|options| options.map_entry())
            && field.type_name().ends_with(&format!(".{}", nested.name()))
    });
    let kind = match (entry, field.label()) {
        (Some(entry), _) => format!("map<{}, {}>", of(&entry.field[0]), of(&entry.field[1])),
        (None, Label::Repeated) => format!("repeated {}", of(field)),
        (None, Label::Optional | Label::Required) => of(field),
    };
    let oneof = field
        .oneof_index
        .and_then(|index| message.oneof_decl.get(usize::try_from(index).unwrap()))
        .map_or(String::new(), |oneof| format!(" in {}", oneof.name()));
    let (name, number) = (field.name(), field.number());
    format!("{}.{name} = {number} {kind}{oneof}", message.name())
}

fn values(of: &EnumDescriptorProto) -> Vec<String> {
    let value = |name: &str, number: i32| format!("enum {}.{name} = {number}", of.name());
    of.value
        .iter()
        .map(|one| value(one.name(), one.number()))
        .collect()
}

/// Without its package.
fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

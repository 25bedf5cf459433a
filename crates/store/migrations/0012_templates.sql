-- Templates: names of images whose layers are unpacked. `image` is JSON: digest, layers, configuration.
CREATE TABLE templates (
    name        TEXT   NOT NULL PRIMARY KEY,
    image       TEXT   NOT NULL,
    layer_bytes TEXT   NOT NULL,
    source      TEXT   NOT NULL,
    created_at  BIGINT NOT NULL,
    created_by  TEXT   NOT NULL
);

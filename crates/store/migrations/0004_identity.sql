-- API keys. Of the key itself only a hash (SHA-256, hexadecimal) is kept.
CREATE TABLE api_keys (
    id         TEXT   NOT NULL PRIMARY KEY,
    name       TEXT   NOT NULL,
    principal  TEXT   NOT NULL,
    hash       TEXT   NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    last_used  BIGINT,
    deleted_at BIGINT
);
CREATE UNIQUE INDEX api_keys_by_name ON api_keys (name) WHERE deleted_at IS NULL;

-- Certificates that are refused although they are ours and not over, by serial number (hexadecimal).
CREATE TABLE revoked_certificates (
    serial     TEXT   NOT NULL PRIMARY KEY,
    revoked_at BIGINT NOT NULL
);

-- Who changed what, the newest last.
CREATE TABLE audit (
    id        INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at        BIGINT  NOT NULL,
    principal TEXT    NOT NULL,
    action    TEXT    NOT NULL,
    object    TEXT    NOT NULL,
    code      TEXT    NOT NULL
);
CREATE INDEX audit_by_principal ON audit (principal, id);

-- Secrets: what is in `sealed` is encrypted with the key file beside the database.
CREATE TABLE secrets (
    owner      TEXT   NOT NULL,
    name       TEXT   NOT NULL,
    key        TEXT   NOT NULL,
    sealed     BLOB   NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (owner, name, key)
);

-- Sessions: columns for what is asked about, JSON for the rest of what was asked for.
CREATE TABLE sessions (
    id         TEXT   NOT NULL PRIMARY KEY,
    owner      TEXT   NOT NULL,
    tenant     TEXT   NOT NULL,
    phase      TEXT   NOT NULL,
    reason     TEXT   NOT NULL,
    runtime    TEXT   NOT NULL,
    sandbox    TEXT   NOT NULL UNIQUE,
    created_at BIGINT NOT NULL,
    last_used  BIGINT NOT NULL,
    ended_at   BIGINT,
    spec       TEXT   NOT NULL
);
CREATE INDEX sessions_by_owner ON sessions (owner, tenant, phase);
CREATE INDEX sessions_by_phase ON sessions (phase, ended_at);

-- Events of a session, numbered from 1.
CREATE TABLE events (
    session TEXT   NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    seq     BIGINT NOT NULL,
    at      BIGINT NOT NULL,
    kind    TEXT   NOT NULL,
    detail  TEXT   NOT NULL,
    PRIMARY KEY (session, seq)
);

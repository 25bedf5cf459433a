-- Questions to people. `decision` is null until somebody decides; what expired is told by the time.
CREATE TABLE approvals (
    id           TEXT   NOT NULL PRIMARY KEY,
    session      TEXT   NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    owner        TEXT   NOT NULL,
    action       TEXT   NOT NULL,
    asked_at     BIGINT NOT NULL,
    asked_by     TEXT   NOT NULL,
    asked_with   TEXT   NOT NULL,
    expires_at   BIGINT NOT NULL,
    decision     TEXT,
    decided_at   BIGINT,
    decided_by   TEXT,
    decided_with TEXT,
    reason       TEXT
);
CREATE INDEX approvals_by_session ON approvals (session, asked_at);
CREATE INDEX approvals_pending ON approvals (owner, expires_at) WHERE decision IS NULL;

-- Names of snapshots and the digests of their layers (JSON). The layers themselves are elsewhere.
CREATE TABLE snapshots (
    owner      TEXT   NOT NULL,
    name       TEXT   NOT NULL,
    layers     TEXT   NOT NULL,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (owner, name)
);

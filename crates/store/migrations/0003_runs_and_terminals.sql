-- Background runs: running ones to find them again after a restart, ended ones with what they wrote.
CREATE TABLE runs (
    id           TEXT   NOT NULL PRIMARY KEY,
    session      TEXT   NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    status       TEXT   NOT NULL,
    reason       TEXT   NOT NULL,
    program      TEXT   NOT NULL,
    started_at   BIGINT NOT NULL,
    ended_at     BIGINT,
    detail       TEXT   NOT NULL,
    output_bytes BIGINT NOT NULL,
    stdout       BLOB   NOT NULL,
    stderr       BLOB   NOT NULL
);
CREATE INDEX runs_by_session ON runs (session, started_at, output_bytes);
CREATE INDEX runs_by_status ON runs (status);

-- Terminals of live sessions: whose they are. What they are doing, their sandboxes know.
CREATE TABLE terminals (
    id         TEXT   NOT NULL PRIMARY KEY,
    session    TEXT   NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    program    TEXT   NOT NULL,
    created_at BIGINT NOT NULL
);
CREATE INDEX terminals_by_session ON terminals (session);

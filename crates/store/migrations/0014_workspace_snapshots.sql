-- Saved workspaces. A row is written when everything that its root names is on disk. `digest` names the root;
-- `stored_bytes` is what its chunks take on disk, also those that other snapshots of the owner share.
CREATE TABLE workspace_snapshots (
    owner        TEXT   NOT NULL,
    name         TEXT   NOT NULL,
    tenant       TEXT   NOT NULL,
    digest       TEXT   NOT NULL,
    session      TEXT   NOT NULL,
    entries      BIGINT NOT NULL,
    files        BIGINT NOT NULL,
    bytes        BIGINT NOT NULL,
    stored_bytes BIGINT NOT NULL,
    created_at   BIGINT NOT NULL,
    PRIMARY KEY (owner, name)
);
CREATE INDEX workspace_snapshots_by_tenant ON workspace_snapshots (tenant);

-- Sub-agents: sessions that live in the sandbox of another. `sandbox` is then only a name of its own
-- for what the session leaves behind.
ALTER TABLE sessions ADD COLUMN parent TEXT;
CREATE INDEX sessions_by_parent ON sessions (parent) WHERE parent IS NOT NULL;

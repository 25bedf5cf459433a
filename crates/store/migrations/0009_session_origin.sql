-- What made a session (create, run, fresh_run, sub_agent) and for which kind of client. Who made those of older
-- servers is not known, so no run uses them again.
ALTER TABLE sessions ADD COLUMN origin TEXT NOT NULL DEFAULT 'create';
ALTER TABLE sessions ADD COLUMN client TEXT NOT NULL DEFAULT 'api';
UPDATE sessions SET origin = 'sub_agent' WHERE parent IS NOT NULL;

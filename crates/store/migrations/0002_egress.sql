-- What a session may reach, as a JSON list of entries. Sandboxes of older servers reach nothing.
ALTER TABLE sessions ADD COLUMN egress TEXT NOT NULL DEFAULT '["none"]';

-- The tenants that the holder of a key may make sessions for: a JSON array of names, the default first,
-- or ["*"] for any. NULL is a key from before there were any: any tenant, as it was then.
ALTER TABLE api_keys ADD COLUMN tenants TEXT;

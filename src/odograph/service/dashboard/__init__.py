"""The pages people look at: rendered on the server, readable without a script, live with one."""

"""The dashboard: HTML pages rendered on the server. They work without JavaScript and update themselves with it."""

"""The `patchkv` command. `patchkv_agents.cli.main` holds the app, each other module one command."""

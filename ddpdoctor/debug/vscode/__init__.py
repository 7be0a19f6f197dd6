"""What VS Code needs to start and attach: launch.json, tasks.json, and editing them with care."""

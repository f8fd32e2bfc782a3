"""Options of the commands, in groups that commands share."""

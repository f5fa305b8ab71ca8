"""The wire: how two processes talk. `frames` bounds what is read, `messages` says what can be said, `stream` carries
both over a socket, `proof` admits only who knows the token, `codecs` makes values smaller."""

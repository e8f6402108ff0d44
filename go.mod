module majordomus

go 1.26.0

require (
	github.com/rogpeppe/go-internal v1.16.0
	golang.org/x/sync v0.25.0
)

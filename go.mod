module majordomus

go 1.26.0

require (
	github.com/rogpeppe/go-internal v1.16.0
	golang.org/x/sync v0.25.0
)

require (
	golang.org/x/sys v0.26.0 // indirect
	golang.org/x/tools v0.26.0 // indirect
)

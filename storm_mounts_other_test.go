//go:build unix && !linux

package main

import "errors"

func ownMounts() (run func(func()), path func(string) string, err error) {
	return nil, nil, errors.New("needs Linux")
}

func mountTmpfs(dir, options string) error { return errors.ErrUnsupported }

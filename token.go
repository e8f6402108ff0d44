package main

// What cannot be guessed: tokens, names, and the proof that somebody knows a token.

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
)

// proof is what only a reader of the lease file can answer to a challenge.
func proof(token, challenge string) string {
	h := hmac.New(sha256.New, []byte(token))
	h.Write([]byte(challenge))
	return hex.EncodeToString(h.Sum(nil))
}

// randomHex is 2n hex digits.
func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

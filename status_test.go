package main

import (
	"testing"
	"time"
)

func TestStanding(t *testing.T) {
	url := "http://127.0.0.1:1"
	file := &executable{Path: "/m", Mtime: 1, Size: 2}
	newer := &executable{Path: "/m", Mtime: 2, Size: 2}
	doc := func(change func(*leaseDocument)) reading {
		d := leaseDocument{URL: &url, Version: "1.2.3", Executable: file}
		if change != nil {
			change(&d)
		}
		return reading{state: readingDocument, held: true, doc: d}
	}
	unheld := doc(nil)
	unheld.held = false
	unbound := doc(func(d *leaseDocument) { d.URL = nil })
	for _, tt := range []struct {
		name string
		e    evidence
		want string
	}{
		{"no lease", evidence{reading: reading{state: readingAbsent}}, "absent"},
		{"empty", evidence{reading: reading{state: readingEmpty}}, "stale"},
		{"corrupt", evidence{reading: reading{state: readingCorrupt, why: "x"}}, "stale"},
		{"corrupt and held", evidence{reading: reading{state: readingCorrupt, held: true}}, "stale"},
		{"not held", evidence{reading: unheld}, "stale"},
		{"no url, young", evidence{reading: unbound, age: 14 * time.Second}, "starting"},
		{"no url, old", evidence{reading: unbound, age: 15 * time.Second}, "stale"},
		{"silent", evidence{reading: doc(nil), probe: probeTimeout, disk: file}, "stale"},
		{"refused", evidence{reading: doc(nil), probe: probeUnreachable, disk: file}, "stale"},
		{"another's", evidence{reading: doc(nil), probe: probeForeign, disk: newer}, "stale"},
		{"not asked", evidence{reading: doc(nil), disk: file}, "stale"},
		{"answers", evidence{reading: doc(nil), probe: probeProven, disk: file}, "ready"},
		{"file replaced", evidence{reading: doc(nil), probe: probeProven, disk: newer}, "outdated"},
		{"file removed", evidence{reading: doc(nil), probe: probeProven}, "outdated"},
		{"file unknown", evidence{reading: doc(func(d *leaseDocument) { d.Executable = nil }), probe: probeProven}, "ready"},
		{"older release", evidence{reading: doc(func(d *leaseDocument) { d.Version = "1.2.2" }), probe: probeProven, disk: file}, "outdated"},
		{"newer release", evidence{reading: doc(func(d *leaseDocument) { d.Version = "2.0.0" }), probe: probeProven, disk: file}, "ready"},
		{"no version", evidence{reading: doc(func(d *leaseDocument) { d.Version = "" }), probe: probeProven, disk: file}, "outdated"},
		{"unordered version", evidence{reading: doc(func(d *leaseDocument) { d.Version = "(devel)" }), probe: probeProven, disk: file}, "ready"},
	} {
		tt.e.version, tt.e.bindGrace = "1.2.3", 15*time.Second
		word, why := standing(tt.e)
		if word != tt.want || (why == "") != (word == "absent" || word == "ready") {
			t.Errorf("%s: %s, %q", tt.name, word, why)
		}
		tt.e.version = "(devel)"
		if word, _ := standing(tt.e); word != tt.want && tt.name != "older release" {
			t.Errorf("%s, seen by an unordered version: %s", tt.name, word)
		}
	}
}

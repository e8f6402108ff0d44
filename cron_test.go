package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// cronTime is a moment in UTC, to the minute or to the second.
func cronTime(t testing.TB, s string) time.Time {
	t.Helper()
	for _, layout := range []string{"2006-01-02 15:04", "2006-01-02 15:04:05"} {
		if m, err := time.Parse(layout, s); err == nil {
			return m
		}
	}
	t.Fatalf("%q is no time", s)
	panic("unreachable")
}

func mustCron(t testing.TB, text string) cronSpec {
	t.Helper()
	c, err := parseCron(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCronNext(t *testing.T) {
	for _, test := range []struct {
		cron, after string
		want        []string // none: never again
	}{
		{"* * * * *", "2026-03-01 10:00", []string{"2026-03-01 10:01", "2026-03-01 10:02"}},
		{"* * * * *", "2026-03-01 10:00:59", []string{"2026-03-01 10:01"}}, // strictly after, but to the minute
		{"* * * * *", "2026-12-31 23:59", []string{"2027-01-01 00:00"}},
		{"*/15 * * * *", "2026-03-01 10:46", []string{"2026-03-01 11:00", "2026-03-01 11:15"}},
		{"*/45 * * * *", "2026-03-01 10:00", []string{"2026-03-01 10:45", "2026-03-01 11:00"}},
		{"50/4 * * * *", "2026-03-01 10:00", []string{"2026-03-01 10:50", "2026-03-01 10:54", "2026-03-01 10:58", "2026-03-01 11:50"}},
		{"10-20/5,0 8 * * *", "2026-03-01 08:00", []string{"2026-03-01 08:10", "2026-03-01 08:15", "2026-03-01 08:20", "2026-03-02 08:00"}},
		{"0 0 31 * *", "2026-01-31 00:00", []string{"2026-03-31 00:00", "2026-05-31 00:00"}},
		{"0 0 30 * *", "2026-01-30 00:00", []string{"2026-03-30 00:00"}},
		{"0 0 31 4,5 *", "2026-01-01 00:00", []string{"2026-05-31 00:00", "2027-05-31 00:00"}},
		{"59 23 28-31 2 *", "2027-02-01 00:00", []string{"2027-02-28 23:59", "2028-02-28 23:59", "2028-02-29 23:59"}},

		// leap years: not 2100, but 2000 and 2400
		{"0 0 29 2 *", "2026-01-01 00:00", []string{"2028-02-29 00:00", "2032-02-29 00:00"}},
		{"0 0 29 2 *", "2096-02-29 00:00", []string{"2104-02-29 00:00"}},
		{"0 0 29 2 *", "1999-12-31 23:59", []string{"2000-02-29 00:00"}},
		{"0 0 29 2 *", "2399-01-01 00:00", []string{"2400-02-29 00:00"}},
		{"0 0 29 2 */7", "2060-03-01 00:00", []string{"2088-02-29 00:00", "2128-02-29 00:00", "2156-02-29 00:00"}}, // Sundays
		{"0 12 29 feb mon", "2027-12-31 00:00", []string{"2028-02-07 12:00", "2028-02-14 12:00", "2028-02-21 12:00", "2028-02-28 12:00", "2028-02-29 12:00"}},

		// both day fields: either one, unless one begins with *
		{"0 0 13 * fri", "2026-03-01 00:00", []string{"2026-03-06 00:00", "2026-03-13 00:00", "2026-03-20 00:00", "2026-03-27 00:00", "2026-04-03 00:00", "2026-04-10 00:00", "2026-04-13 00:00"}},
		{"0 0 */2 * mon", "2026-03-01 00:00", []string{"2026-03-09 00:00", "2026-03-23 00:00"}},
		{"0 0 13 * */5", "2026-01-01 00:00", []string{"2026-02-13 00:00", "2026-03-13 00:00", "2026-09-13 00:00"}},
		{"0 0 1-31 * mon", "2026-03-01 00:00", []string{"2026-03-02 00:00", "2026-03-03 00:00"}},
		{"0 0 30 2 mon", "2026-02-01 00:00", []string{"2026-02-02 00:00"}}, // the date never comes, the Monday does

		// Sunday is 0 and 7; 2026-03-01 is one
		{"0 0 * * 0", "2026-03-01 00:00", []string{"2026-03-08 00:00"}},
		{"0 0 * * 7", "2026-03-01 00:00", []string{"2026-03-08 00:00"}},
		{"0 0 * * sat-sun", "2026-03-01 00:00", []string{"2026-03-07 00:00", "2026-03-08 00:00", "2026-03-14 00:00"}},
		{"0 0 * * 5-7", "2026-03-01 00:00", []string{"2026-03-06 00:00", "2026-03-07 00:00", "2026-03-08 00:00", "2026-03-13 00:00"}},
		{"0 0 * * 5-0", "2026-03-01 00:00", []string{"2026-03-06 00:00", "2026-03-07 00:00", "2026-03-08 00:00", "2026-03-13 00:00"}},
		{"0 0 * * sun-mon", "2026-03-01 00:00", []string{"2026-03-02 00:00", "2026-03-08 00:00"}},
		{"0 0 * * 7-7", "2026-03-01 00:00", []string{"2026-03-08 00:00"}},
		{"0 0 * * 4/3", "2026-03-01 00:00", []string{"2026-03-05 00:00", "2026-03-08 00:00", "2026-03-12 00:00"}},
		{"0 0 * * sun/3", "2026-03-01 00:00", []string{"2026-03-04 00:00", "2026-03-07 00:00", "2026-03-08 00:00"}},
		{"30 9 * * Mon-FRI", "2026-03-06 09:30", []string{"2026-03-09 09:30"}},
		{"0 0 1 JAN,jul *", "2026-03-01 00:00", []string{"2026-07-01 00:00", "2027-01-01 00:00"}},
		{"0 0 1 nov-DEC *", "2026-03-01 00:00", []string{"2026-11-01 00:00", "2026-12-01 00:00", "2027-11-01 00:00"}},

		{"@hourly", "2026-03-01 10:00", []string{"2026-03-01 11:00"}},
		{"@Daily", "2026-03-01 10:00", []string{"2026-03-02 00:00"}},
		{"@midnight", "2026-03-01 10:00", []string{"2026-03-02 00:00"}},
		{" @WEEKLY\n", "2026-03-01 10:00", []string{"2026-03-08 00:00"}},
		{"@monthly", "2026-03-01 10:00", []string{"2026-04-01 00:00"}},
		{"@yearly", "2026-03-01 10:00", []string{"2027-01-01 00:00"}},
		{"@annually", "2026-03-01 10:00", []string{"2027-01-01 00:00"}},

		{"* * * * *", "9999-12-31 23:58", []string{"9999-12-31 23:59"}},
		{"* * * * *", "9999-12-31 23:59", nil},
		{"0 0 29 2 *", "9996-02-29 00:00", nil},
	} {
		c, now := mustCron(t, test.cron), cronTime(t, test.after)
		for _, want := range test.want {
			if now = c.next(now); !now.Equal(cronTime(t, want)) || now.Location() != time.UTC {
				t.Fatalf("%q after %s: %s, want %s", test.cron, test.after, now, want)
			}
		}
		if test.want == nil && !c.next(now).IsZero() {
			t.Errorf("%q after %s: %s, want never", test.cron, test.after, c.next(now))
		}
	}
}

func TestCronRefused(t *testing.T) {
	long := strings.Repeat("1,", 300) + "1"
	for _, test := range []struct {
		cron string
		want []string // named in the message
	}{
		{"", []string{"0 fields", "five"}},
		{"* * * *", []string{"4 fields", `"* * * *"`}},
		{"0 * * * * *", []string{"6 fields"}},
		{"60 * * * *", []string{`minute "60"`, "0-59"}},
		{"-1 * * * *", []string{`minute "-1": "-1" is`, "0-59"}},
		{"+1 * * * *", []string{`minute "+1"`, "0-59"}},
		{"1.5 * * * *", []string{`minute "1.5"`, "0-59"}},
		{"99999999999999999999 * * * *", []string{"minute", "0-59"}},
		{"5-1 * * * *", []string{`minute "5-1"`, "backwards", `"5-59,0-1"`, "0-59"}},
		{"1- * * * *", []string{`minute "1-": "1-" is`}},
		{"1-2-3 * * * *", []string{`"2-3"`}},
		{"*/0 * * * *", []string{`minute "*/0"`, `step "0"`, "1-60"}},
		{"*/61 * * * *", []string{`step "61"`, "1-60"}},
		{"* * * * */8", []string{`step "8"`, "1-7"}},
		{"*/-1 * * * *", []string{`step "-1"`}},
		{"*/5/5 * * * *", []string{`step "5/5"`}},
		{"*/ * * * *", []string{`step ""`}},
		{"1,,2 * * * *", []string{`minute "1,,2"`}},
		{"1, * * * *", []string{`minute "1,"`}},
		{"*-5 * * * *", []string{`minute "*-5"`}},
		{"** * * * *", []string{`minute "**"`}},
		{"? * * * *", []string{`minute "?"`}},
		{"* 24 * * *", []string{`hour "24"`, "0-23"}},
		{"* 22-2 * * *", []string{`hour "22-2"`, `"22-23,0-2"`}},
		{"* * 0 * *", []string{`day of month "0"`, "1-31"}},
		{"* * 32 * *", []string{`day of month "32"`, "1-31"}},
		{"* * L * *", []string{`day of month "L"`, "1-31"}},
		{"* * * 0 *", []string{`month "0"`, "1-12 or jan-dec"}},
		{"* * * 13 *", []string{`month "13"`}},
		{"* * * janu *", []string{`month "janu"`}},
		{"* * * mon *", []string{`month "mon"`}},
		{"* * * * 8", []string{`day of week "8"`, "0-7 or sun-sat"}},
		{"* * * * jan", []string{`day of week "jan"`}},
		{"* * * * fri-mon", []string{`"fri-7,0-mon"`}},
		{"* * * * mon#2", []string{`day of week "mon#2"`}},
		{"@reboot", []string{`"@reboot"`, "@hourly", "@annually"}},
		{"@every 5m", []string{"2 fields"}},
		{"@daily 5 * * *", []string{`minute "@daily"`}},
		{"0 0 30 2 *", []string{`day of month "30"`, `month "2"`, "1-29"}},
		{"0 0 30,31 feb *", []string{`day of month "30,31"`, `month "feb"`, "1-29"}},
		{"0 0 31 4,6 *", []string{`day of month "31"`, `month "4,6"`, "1-30"}},
		{"0 0 31 2/2 */2", nil}, // August
		{"0 0 31 2-6/2 */2", []string{"1-30"}},
		{"0 0 29 2 *", nil},
		{"0 0 29 2 */7", nil},
		{long + " * * * *", []string{"bytes", "500"}},
		{"0\x00 * * * *", []string{"minute"}},
		{"\xff\xfe * * * *", []string{"minute"}},
	} {
		start := time.Now()
		_, err := parseCron(test.cron)
		if d := time.Since(start); d > 100*time.Millisecond {
			t.Errorf("%q took %s", test.cron, d)
		}
		if (err != nil) != (test.want != nil) {
			t.Errorf("%q: %v", test.cron, err)
		}
		if err == nil {
			continue
		}
		checkRefusal(t, err, true)
		for _, want := range append(test.want, "cron: ", `for example "30 9 * * mon-fri"`) {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q: %s; want %s in it", test.cron, err, want)
			}
		}
	}
}

func TestCronMonthEnds(t *testing.T) {
	for month, days := range []int{1: 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31} {
		for day := 28; day <= 31 && month > 0; day++ {
			if _, err := parseCron(fmt.Sprintf("0 0 %d %d *", day, month)); (err == nil) != (day <= days) {
				t.Errorf("day %d of month %d: %v", day, month, err)
			}
		}
	}
}

func TestCronText(t *testing.T) {
	for text, want := range map[string]string{
		"  0\t 9 *  * Mon-FRI \n": "0 9 * * Mon-FRI",
		" @Daily ":                "@Daily",
		strings.Repeat(" ", 10_000) + "007 9 * * *": "007 9 * * *",
	} {
		if c := mustCron(t, text); c.text != want || c != mustCron(t, c.text) {
			t.Errorf("%.40q: %+v, want the text %q", text, c, want)
		}
	}
	full := make([]string, len(cronFields)) // every value of every field listed
	for i, f := range cronFields {
		for v := f.low; v <= f.high; v++ {
			full[i] += "," + strconv.Itoa(v)
		}
		full[i] = full[i][1:]
	}
	mustCron(t, strings.Join(full, " "))
}

// TestCronZones: the same instants whatever the zone of the time given, through both changes of the clock.
func TestCronZones(t *testing.T) {
	zone := time.FixedZone("", 5*3600+45*60)
	for _, text := range []string{"30 2 * * *", "30 1 * * *", "*/30 * * * *"} {
		c := mustCron(t, text)
		for now := cronTime(t, "2026-03-07 00:00"); now.Before(cronTime(t, "2026-11-02 00:00")); now = c.next(now) {
			if a, b := c.next(now), c.next(now.In(zone)); a != b {
				t.Fatalf("%q after %s: %s and %s", text, now, a, b)
			}
		}
	}
}

// TestCronExtremes wants an end to every search, from moments that no clock shows too.
func TestCronExtremes(t *testing.T) {
	for _, c := range []cronSpec{{}, mustCron(t, "* * * * *"), mustCron(t, "59 23 29 2 */7"), mustCron(t, "59 23 31 12 *")} {
		for _, unix := range []int64{math.MinInt64, math.MinInt64 / 2, -1 << 40, 0, 253402300799, 253402300800, 1 << 40, math.MaxInt64 / 2, math.MaxInt64} {
			since := time.Unix(unix, 0)
			c.next(since)
			c.missed(since, time.Unix(math.MaxInt64, 0))
		}
		c.next(time.Time{})
	}
}

func TestCronMissed(t *testing.T) {
	for _, test := range []struct {
		cron, since, until string
		n                  int
		last               string
	}{
		{"* * * * *", "2026-03-01 10:00", "2026-03-01 10:10", 10, "2026-03-01 10:10"},
		{"* * * * *", "2026-03-01 10:00", "2026-03-01 10:00:59", 0, ""},
		{"* * * * *", "2026-03-01 10:00", "2026-03-01 09:00", 0, ""}, // the clock was put back
		{"* * * * *", "2026-03-01 10:00", "2026-03-31 10:00", 43_200, "2026-03-31 10:00"},
		{"0 */6 * * *", "2026-03-01 05:59", "2026-03-03 18:00", 11, "2026-03-03 18:00"},
		{"0 */6 * * *", "2026-02-28 23:59", "2026-03-01 18:00", 4, "2026-03-01 18:00"},
		{"0 */6 * * *", "2026-02-28 23:59", "2026-03-01 17:59:59", 3, "2026-03-01 12:00"},
		{"30 9 * * *", "2026-01-01 09:30", "2036-01-01 09:30", 3652, "2036-01-01 09:30"},
		{"0 0 29 2 *", "2026-01-01 00:00", "2026-12-31 00:00", 0, ""},
		{"@yearly", "9990-06-01 00:00", "9999-12-31 23:59", 9, "9999-01-01 00:00"},
	} {
		n, last := mustCron(t, test.cron).missed(cronTime(t, test.since), cronTime(t, test.until))
		if n != test.n || test.n == 0 && !last.IsZero() || test.n > 0 && !last.Equal(cronTime(t, test.last)) {
			t.Errorf("%q from %s to %s: %d, %s; want %d, %s", test.cron, test.since, test.until, n, last, test.n, test.last)
		}
	}
	if n, last := mustCron(t, "*/2 * * * *").missed(cronTime(t, "2026-01-01 00:00"), cronTime(t, "9999-12-31 00:00")); n != missedLimit || last.Year() != 2026 {
		t.Errorf("%d missed up to %s, want the limit and no more looked at", n, last)
	}
}

func TestFireAt(t *testing.T) {
	now := cronTime(t, "2026-11-30 10:28:30")
	for text, want := range map[string]string{
		"2026-12-01T08:30:15Z":                 "2026-12-01T08:30:15Z",
		"2026-12-01T08:30Z":                    "2026-12-01T08:30:00Z",
		"2026-12-01T08:30":                     "2026-12-01T08:30:00Z",
		"2026-12-01 08:30":                     "2026-12-01T08:30:00Z",
		" 2026-12-01t08:30:15z\n":              "2026-12-01T08:30:15Z",
		"2026-12-01 08:30:15.25":               "2026-12-01T08:30:15.25Z",
		"2026-12-01 08:30:15,25+00:00":         "2026-12-01T08:30:15.25Z",
		"2026-12-01T08:30:15.1234567899999Z":   "2026-12-01T08:30:15.123456789Z",
		"2026-12-01":                           "2026-12-01T00:00:00Z",
		"2026-12-01T00:30+02:00":               "2026-11-30T22:30:00Z",
		"2026-12-01T23:30-0530":                "2026-12-02T05:00:00Z",
		"2026-12-01T08:30:15.5+05":             "2026-12-01T03:30:15.5Z",
		"2026-12-01T08:30-00:00":               "2026-12-01T08:30:00Z",
		"2026-12-01T08:30+23:59":               "2026-11-30T08:31:00Z",
		"2028-02-29":                           "2028-02-29T00:00:00Z",
		"2026-12-31T24:00":                     "2027-01-01T00:00:00Z",
		"2026-12-31 24:00:00.000+01:00":        "2026-12-31T23:00:00Z",
		"1970-01-01":                           "1970-01-01T00:00:00Z", // past: the caller fires it at once
		"0001-01-02":                           "0001-01-02T00:00:00Z",
		"9999-12-31T23:59:59.999Z":             "9999-12-31T23:59:59.999Z",
		"9999-12-31T24:00+01:00":               "9999-12-31T23:00:00Z",
		"2026-12-01T9:30":                      "2026-12-01T09:30:00Z",
		"":                                     "",
		"soon":                                 "",
		"in 5 minutes":                         "",
		"1796113800":                           "",
		"2026":                                 "",
		"2026-12":                              "",
		"2026-13-01":                           "",
		"2026-02-29":                           "",
		"2026-12-1":                            "",
		"20261201T083000Z":                     "",
		"2026-W49-2":                           "",
		"2026/12/01":                           "",
		"01-12-2026":                           "",
		"2026-12-01T":                          "",
		"2026-12-01Z":                          "",
		"2026-12-01+02:00":                     "",
		"2026-12-01T08":                        "",
		"2026-12-01T08:60":                     "",
		"2026-12-01T08:30.5":                   "",
		"2026-12-01T08:30:15.":                 "",
		"2026-12-01T25:00":                     "",
		"2026-12-01T24:01":                     "",
		"2026-12-01T24:00:01":                  "",
		"2026-12-01T24:00:00.001":              "",
		"2026-12-01T24:00T24:00":               "",
		"2026-12-31T23:59:60Z":                 "",
		"2026-12-01T08:30+24:00":               "",
		"2026-12-01T08:30+05:60":               "",
		"2026-12-01T08:30+":                    "",
		"2026-12-01T08:30+02:00Z":              "",
		"2026-12-01T08:30Z02:00":               "",
		"2026-12-01T08:30ZZ":                   "",
		"2026-12-01T08:30 UTC":                 "",
		"2026-12-01T08:30 Europe/Berlin":       "",
		"2026-12-01  08:30":                    "",
		"0000-01-01":                           "",
		"0001-01-01T00:00:00Z":                 "", // Go's zero time
		"0001-01-01T05:00+06:00":               "",
		"-0001-01-01":                          "",
		"9999-12-31T23:59-00:01":               "",
		"9999-12-31T24:00":                     "",
		"10000-01-01":                          "",
		"+10000-01-01T00:00Z":                  "",
		strings.Repeat("2026-12-01 ", 100_000): "",
		"2026-12-01T08:30\xff":                 "",
	} {
		got, err := parseFireAt(text, now)
		if err != nil {
			checkRefusal(t, err, true)
			if !strings.HasPrefix(err.Error(), "fire_at: "+quote(text)) || !strings.Contains(err.Error(), `"2026-11-30T11:28:30Z"`) {
				t.Errorf("%.60q: %s", text, err)
			}
			if want != "" {
				t.Errorf("%q: %s", text, err)
			}
			continue
		}
		if got.Location() != time.UTC || got.Format(time.RFC3339Nano) != want {
			t.Errorf("%.60q: %s, want %q", text, got, want)
		}
	}
}

// What follows decides once more when an expression is due, in another way: from its text, value by value, along a
// calendar of its own.

var cronNames = [...]string{3: "jan feb mar apr may jun jul aug sep oct nov dec", 4: "sun mon tue wed thu fri sat"}

// scanCron looks at one day after the other, and on those that fit at every minute, for 41 years, within which every
// expression is due.
func scanCron(text string, after time.Time) time.Time {
	fields := strings.Fields(strings.ToLower(text))
	switch fields[0] {
	case "@hourly":
		fields = strings.Fields("0 * * * *")
	case "@daily", "@midnight":
		fields = strings.Fields("0 0 * * *")
	case "@weekly":
		fields = strings.Fields("0 0 * * 7")
	case "@monthly":
		fields = strings.Fields("0 0 1 * *")
	case "@yearly", "@annually":
		fields = strings.Fields("0 0 1 1 *")
	}
	var due [5][60]bool
	for i, field := range fields {
		for v := range due[i] {
			due[i][v] = scanField(i, field, v) || i == 4 && v == 0 && scanField(i, field, 7)
		}
	}
	both := fields[2][:1] == "*" || fields[4][:1] == "*"
	year, m, day := after.Date()
	month, weekday := int(m), int(after.Weekday())
	minute := after.Hour()*60 + after.Minute() + 1
	for range 41 * 366 {
		d, w := due[2][day], due[4][weekday]
		if due[3][month] && (d && w || !both && (d || w)) {
			for ; minute < 24*60; minute++ {
				if due[1][minute/60] && due[0][minute%60] {
					return time.Date(year, time.Month(month), day, 0, minute, 0, 0, time.UTC)
				}
			}
		}
		minute, weekday, day = 0, (weekday+1)%7, day+1
		length := [...]int{1: 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31}[month]
		if month == 2 && year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			length++
		}
		if day > length {
			month, day = month+1, 1
		}
		if month > 12 {
			year, month = year+1, 1
		}
		if year > 9999 {
			break
		}
	}
	return time.Time{}
}

// scanField reports whether the text of field i names v.
func scanField(i int, text string, v int) bool {
	low := []int{0, 0, 1, 1, 0}[i]
	for n, name := range strings.Fields(cronNames[max(i, 3)]) {
		if i >= 3 {
			text = strings.ReplaceAll(text, name, strconv.Itoa(low+n))
		}
	}
	for _, item := range strings.Split(text, ",") {
		var a, b, n int
		switch {
		case item == "*":
			return true
		case scanItem(item, "*/%d", &n):
			a, b = low, 59
		case scanItem(item, "%d-%d/%d", &a, &b, &n):
		case scanItem(item, "%d-%d", &a, &b):
			n = 1
		case scanItem(item, "%d/%d", &a, &n):
			b = 59
		case scanItem(item, "%d", &a):
			b, n = a, 1
		}
		if i == 4 && b == 0 && a > 0 {
			b = 7
		}
		if i == 4 {
			b = min(b, 7)
		}
		if a <= v && v <= b && (v-a)%n == 0 {
			return true
		}
	}
	return false
}

func scanItem(s, format string, to ...any) bool {
	n, err := fmt.Sscanf(s+";", format+";", to...)
	return err == nil && n == len(to)
}

// madeCron makes an expression that is allowed, but for impossible dates.
func madeCron(r *rand.Rand) string {
	var fields []string
	for i, f := range cronFields {
		names := strings.Fields(cronNames[max(i, 3)])
		show := func(v int) string {
			if i >= 3 && r.IntN(3) == 0 && v-f.low < len(names) {
				name := names[v-f.low]
				return []string{name, strings.ToUpper(name), strings.ToUpper(name[:1]) + name[1:]}[r.IntN(3)]
			}
			return strings.Repeat("0", r.IntN(2)) + strconv.Itoa(v)
		}
		item := func() string {
			a := f.low + r.IntN(f.high-f.low+1)
			b := a + r.IntN(f.high-a+1)
			step := "/" + strconv.Itoa(1+r.IntN(f.high-f.low))
			return []string{"*", "*" + step, show(a), show(a), show(a) + step, show(a) + "-" + show(b), show(a) + "-" + show(b) + step}[r.IntN(7)]
		}
		text := "*"
		if r.IntN(3) > 0 {
			text = item()
			for r.IntN(3) == 0 {
				text += "," + item()
			}
		}
		fields = append(fields, text)
	}
	return strings.Join(fields, strings.Repeat(" ", 1+r.IntN(3)))
}

// cronMoment maps any number to a moment of the years 1 to 9999.
func cronMoment(seconds int64) time.Time {
	const first, after = -62135596800, 253402300800
	return time.Unix(first+int64(uint64(seconds)%(after-first)), 0).UTC()
}

// checkNext holds next and missed against the scan.
func checkNext(t *testing.T, c cronSpec, after time.Time) {
	t.Helper()
	got, want := c.next(after), scanCron(c.text, after)
	if got != want {
		t.Fatalf("%q after %s: %s, the scan says %s", c.text, after, got, want)
	}
	until := after.Add(time.Duration(after.Unix()&0xfffff) * 3 * time.Second) // to 36 days
	n, last := 0, time.Time{}
	for now := got; !now.IsZero() && !now.After(until); now = c.next(now) {
		n, last = n+1, now
	}
	if m, end := c.missed(after, until); m != n || end != last {
		t.Fatalf("%q from %s to %s: %d missed, the last at %s; one by one %d, %s", c.text, after, until, m, end, n, last)
	}
}

func FuzzCronNext(f *testing.F) {
	for seed := range uint64(50) {
		f.Add(seed, int64(seed)*6_000_000_011)
	}
	f.Add(uint64(1), int64(253402300799+62135596800))
	f.Fuzz(func(t *testing.T, seed uint64, seconds int64) {
		text := madeCron(rand.New(rand.NewPCG(seed, 0)))
		c, err := parseCron(text)
		if err != nil {
			if !strings.Contains(err.Error(), "never comes") && !strings.Contains(err.Error(), "bytes") {
				t.Fatal(err)
			}
			// 2000-03-01 begins 41 years with every kind of day.
			if len(text) < cronLimit && !scanCron(text, time.Date(2000, 3, 1, 0, 0, 0, 0, time.UTC)).IsZero() {
				t.Fatalf("%v, but it does", err)
			}
			return
		}
		checkNext(t, c, cronMoment(seconds))
	})
}

func FuzzParseCron(f *testing.F) {
	for _, seed := range []string{"", "* * * * *", "*/15 0-6,22 1,15 * mon-fri", "0 0 29 2 *", "0 0 30 feb *", "5-1 * * * *", "@daily", "@every 5m", "0 0 * * sat-sun", "0 0 */2 * 5-7/2",
		"59 23 31 DEC 7", "1/7 2/3 4/5 6/2 0/2", "60 24 0 13 8", " 0\t0 L * 5#2", "00 007 +1 -1 */0", "0 0 1,,2 * ?", "* * * * fri-mon,*"} {
		f.Add(seed, int64(63908000000))
	}
	f.Fuzz(func(t *testing.T, text string, seconds int64) {
		c, err := parseCron(text)
		if err != nil {
			checkRefusal(t, err, true)
			if c != (cronSpec{}) || !strings.Contains(err.Error(), "for example") {
				t.Fatalf("%+v: %v", c, err)
			}
			return
		}
		if again, err := parseCron(c.text); err != nil || again != c || len(c.text) > cronLimit || !oneLine(c.text) || strings.Contains(c.text, "\t") || !utf8.ValidString(c.text) {
			t.Fatalf("%q is %+v, its text %+v, %v", text, c, again, err)
		}
		checkNext(t, c, cronMoment(seconds))
	})
}

func FuzzFireAt(f *testing.F) {
	for _, seed := range []string{"", "2026-12-01T08:30:15Z", "2026-12-01 08:30", "2026-12-01", "2026-12-01t08:30:15.25z", "2026-12-01T08:30+02:00", "2026-12-01T08:30:15,5-0530",
		"2026-12-31T24:00:00.0+01", "2026-12-31T23:59:60Z", "9999-12-31T23:59:59-00:01", "0001-01-01T00:00:00Z", "10000-01-01", "tomorrow", "1796113800", "2026-02-29"} {
		f.Add(seed)
	}
	now := cronTime(f, "2026-11-30 10:28")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseFireAt(text, now)
		std, stdErr := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			checkRefusal(t, err, true)
			if stdErr == nil && std.After(time.Time{}) && std.UTC().Year() <= 9999 {
				t.Fatalf("%q is RFC 3339: %v", text, err)
			}
			return
		}
		if stdErr == nil && !got.Equal(std) {
			t.Fatalf("%q is %s, package time has %s", text, got, std)
		}
		if y := got.Year(); got.Location() != time.UTC || got.IsZero() || y < 1 || y > 9999 {
			t.Fatalf("%q is %s", text, got)
		}
		for _, format := range []string{time.RFC3339Nano, "2006-01-02 15:04:05.999999999", "2006-01-02T15:04:05.999999999-0700"} {
			if again, err := parseFireAt(got.Format(format), now); err != nil || again != got {
				t.Fatalf("%q is %s, then %s, %v", text, got, again, err)
			}
		}
		checkNext(t, mustCron(t, "* * * * *"), got)
	})
}

func BenchmarkCron(b *testing.B) {
	start := cronTime(b, "2088-03-01 00:00")
	for _, text := range []string{"* * * * *", "59 23 31 12 *", "59 23 29 2 */7"} { // the last one: 40 years
		c := mustCron(b, text)
		b.Run("next/"+text, func(b *testing.B) {
			for b.Loop() {
				c.next(start)
			}
		})
		b.Run("missed/"+text, func(b *testing.B) { // a month
			for b.Loop() {
				c.missed(start.Add(time.Minute), start.AddDate(0, 1, 0))
			}
		})
	}
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			mustCron(b, "*/15 0-6,22 1,15 * mon-fri")
		}
	})
}

package main

// When a schedule is due: five cron fields, or the one moment of fire_at. All of it is UTC, which has no hour that is
// missing or comes twice, so that neither the server's zone nor daylight saving can move, skip or double anything.
// Nothing here reads a clock.
//
// Where crons differ, this one does as the cron of Linux does: with both day fields restricted either one suffices,
// and a field is unrestricted if it begins with *, so that "*/2" in one still narrows the other.

import (
	"cmp"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	cronLimit   = 500     // bytes; every value of every field listed is shorter
	missedLimit = 100_000 // 69 days of every minute
	lastYear    = 9999    // RFC 3339 writes a year with four digits
)

const cronExample = `for example "30 9 * * mon-fri", which is 09:30 UTC on workdays`

// cronSpec is what an expression means. The zero value is never due.
type cronSpec struct {
	text string // as given, with one blank between the fields: parses to the same again

	minute, hour, day, month, weekday uint64 // sets: bit n stands for n

	eitherDay bool // day and weekday are both restricted: one of them suffices
}

type cronField struct {
	name      string
	low, high int
	allowed   string
	names     string // of the values from low on
}

// Sunday is 0 and 7, so that fri-sun and 5-7 are ranges like any other; set makes one of the two.
var cronFields = [...]cronField{
	{"minute", 0, 59, "0-59", ""},
	{"hour", 0, 23, "0-23", ""},
	{"day of month", 1, 31, "1-31", ""},
	{"month", 1, 12, "1-12 or jan-dec", "jan feb mar apr may jun jul aug sep oct nov dec"},
	{"day of week", 0, 7, "0-7 or sun-sat", "sun mon tue wed thu fri sat"},
}

func parseCron(text string) (cronSpec, error) {
	fields := strings.Fields(text)
	c := cronSpec{text: strings.Join(fields, " ")}
	if len(c.text) > cronLimit {
		return cronSpec{}, refuse("invalid_input", "cron: %s has %d bytes, at most %d are allowed; %s", quote(c.text), len(c.text), cronLimit, cronExample)
	}
	if len(fields) == 1 && strings.HasPrefix(fields[0], "@") {
		if fields = cronAlias(fields[0]); fields == nil {
			return cronSpec{}, refuse("invalid_input", "cron: %s is no alias; allowed are @hourly, @daily, @midnight, @weekly, @monthly, @yearly, @annually and five fields, %s", quote(text), cronExample)
		}
	}
	if len(fields) != len(cronFields) {
		return cronSpec{}, refuse("invalid_input", "cron: %s has %d fields; it takes five, minute, hour, day of month, month and day of week, %s", quote(c.text), len(fields), cronExample)
	}
	for i, set := range []*uint64{&c.minute, &c.hour, &c.day, &c.month, &c.weekday} {
		var err error
		if *set, err = cronFields[i].set(fields[i]); err != nil {
			return cronSpec{}, err
		}
	}
	c.eitherDay = fields[2][0] != '*' && fields[4][0] != '*'
	if days := c.longestMonth(); !c.eitherDay && bits.TrailingZeros64(c.day) > days {
		return cronSpec{}, refuse("invalid_input", "cron: day of month %s never comes in month %s; allowed there is 1-%d, %s", quote(fields[2]), quote(fields[3]), days, cronExample)
	}
	return c, nil
}

// cronAlias gives the fields an alias stands for, or nil.
func cronAlias(alias string) []string {
	switch strings.ToLower(alias) {
	case "@hourly":
		return []string{"0", "*", "*", "*", "*"}
	case "@daily", "@midnight":
		return []string{"0", "0", "*", "*", "*"}
	case "@weekly":
		return []string{"0", "0", "*", "*", "0"}
	case "@monthly":
		return []string{"0", "0", "1", "*", "*"}
	case "@yearly", "@annually":
		return []string{"0", "0", "1", "1", "*"}
	}
	return nil
}

// set gives the values that a field allows.
func (f *cronField) set(text string) (set uint64, err error) {
	for item := range strings.SplitSeq(text, ",") {
		from, to, step, problem := f.item(item)
		if problem != "" {
			return 0, refuse("invalid_input", "cron: %s %s: %s; allowed is %s, in lists (1,5), ranges (1-5) and steps (*/2, 1-5/2), %s", f.name, quote(text), problem, f.allowed, cronExample)
		}
		for v := from; v <= to; v += step {
			set |= 1 << v
		}
	}
	if f.high == 7 {
		set = (set | set>>7) &^ (1 << 7)
	}
	return set, nil
}

// item reads one item of a field's list: the values from, from+step, … up to to, or what is wrong with it.
func (f *cronField) item(item string) (from, to, step int, problem string) {
	values, every, stepped := strings.Cut(item, "/")
	first, last, ranged := strings.Cut(values, "-")
	from, to, step = f.low, f.high, 1
	ok := true
	if values != "*" {
		if from, ok = f.value(first); !ok {
			return 0, 0, 0, quote(cmp.Or(first, values)) + " is none of its values"
		}
		if ranged {
			if to, ok = f.value(last); !ok {
				return 0, 0, 0, quote(cmp.Or(last, values)) + " is none of its values"
			}
		} else if !stepped {
			to = from
		}
	}
	if f.high == 7 && to == 0 && from > 0 {
		to = 7 // the Sunday that ends a range
	}
	if from > to {
		return 0, 0, 0, "the range " + quote(values) + " runs backwards: write " + quote(first+"-"+strconv.Itoa(f.high)+","+strconv.Itoa(f.low)+"-"+last)
	}
	if stepped {
		// A step longer than the field would be legal elsewhere, and mean something else than it says: */90 minutes
		// is once an hour.
		limit := f.high - f.low + 1
		if f.high == 7 {
			limit = 7
		}
		if step, ok = cronNumber(every); !ok || step < 1 || step > limit {
			return 0, 0, 0, "the step " + quote(every) + " is not one of 1-" + strconv.Itoa(limit)
		}
	}
	return from, to, step, ""
}

// value reads a number or name of the field.
func (f *cronField) value(s string) (int, bool) {
	if i := slices.Index(strings.Fields(f.names), strings.ToLower(s)); i >= 0 {
		return f.low + i, true
	}
	n, ok := cronNumber(s)
	return n, ok && f.low <= n && n <= f.high
}

// cronNumber reads digits and nothing else: no sign.
func cronNumber(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return int(n), err == nil
}

// longestMonth gives the most days that a month of c ever has.
func (c cronSpec) longestMonth() int {
	const thirtyOne, february = 1<<1 | 1<<3 | 1<<5 | 1<<7 | 1<<8 | 1<<10 | 1<<12, 1 << 2
	switch {
	case c.month&thirtyOne != 0:
		return 31
	case c.month != february:
		return 30
	}
	return 29
}

// next gives the first minute strictly after a moment at which c is due, in UTC, or the zero time if there is none up
// to the end of the year 9999.
//
// It leaves a month, day or hour that does not fit as a whole. The longest way is 40 years, from one 29 February on a
// given weekday to the next across a year such as 2100; beyond that nothing is due ever, and the search ends.
func (c cronSpec) next(after time.Time) time.Time {
	t := after.UTC().Truncate(time.Minute).Add(time.Minute)
	for end := min(t.Year()+40, lastYear); t.Year() <= end; {
		switch y, m, d := t.Date(); {
		case !inSet(c.month, int(m)):
			t = time.Date(y, m+1, 1, 0, 0, 0, 0, time.UTC)
		case !c.onDay(t):
			t = time.Date(y, m, d+1, 0, 0, 0, 0, time.UTC)
		case !inSet(c.hour, t.Hour()):
			t = t.Truncate(time.Hour).Add(time.Hour)
		case !inSet(c.minute, t.Minute()):
			t = t.Add(time.Minute)
		default:
			return t
		}
	}
	return time.Time{}
}

func (c cronSpec) onDay(t time.Time) bool {
	day, weekday := inSet(c.day, t.Day()), inSet(c.weekday, int(t.Weekday()))
	if c.eitherDay {
		return day || weekday
	}
	return day && weekday
}

func inSet(set uint64, n int) bool { return set>>n&1 != 0 }

// missed counts the times at which c was due after since and up to until, and gives the last of them, or the zero time.
// Counting ends at missedLimit: that number means "at least", and last is then not the last.
//
// Days that lie between count as a whole, since thousands of schedules may have to be looked at when a server starts
// after weeks in which none ran.
func (c cronSpec) missed(since, until time.Time) (n int, last time.Time) {
	perDay := bits.OnesCount64(c.hour) * bits.OnesCount64(c.minute)
	for t := c.next(since); !t.IsZero() && !t.After(until) && n < missedLimit; t = c.next(last) {
		y, m, d := t.Date()
		first := time.Date(y, m, d, bits.TrailingZeros64(c.hour), bits.TrailingZeros64(c.minute), 0, 0, time.UTC)
		final := time.Date(y, m, d, bits.Len64(c.hour)-1, bits.Len64(c.minute)-1, 0, 0, time.UTC)
		if t.Equal(first) && !final.After(until) {
			n, last = n+perDay, final
		} else {
			n, last = n+1, t
		}
	}
	return min(n, missedLimit), last
}

// parseFireAt reads a moment in ISO 8601 and gives it in UTC, which is also what no offset means. It may lie in the
// past. From now only the example of a refusal is made.
//
// 24:00 is the end of its day, as the standard has it. A leap second is refused: no clock here ever shows one. So is the
// zero time, by which programs mean that there is none.
func parseFireAt(text string, now time.Time) (time.Time, error) {
	const day = len("2006-01-02")
	s := strings.ToUpper(strings.TrimSpace(text))
	if len(s) > day && s[day] == ' ' {
		s = s[:day] + "T" + s[day+1:]
	}
	// The offset is read apart because time.Parse allows +24:60, and so that the server's own zone is never asked for.
	offset, ok := time.Duration(0), true
	if i := strings.LastIndexAny(s, "Z+-"); i > day {
		offset, ok = parseOffset(s[i:])
		s = s[:i]
	}
	t, rest := time.Time{}, time.Duration(0)
	if before, after, found := strings.Cut(s, "T24:00"); found && ok {
		s, rest = before+"T00:00"+after, 24*time.Hour
		ok = strings.Trim(after, ":.,0") == ""
	}
	if ok {
		t, ok = parseAny(s, "2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02")
	}
	t = t.Add(rest - offset)
	if !ok || !t.After(time.Time{}) || t.Year() > lastYear {
		return time.Time{}, refuse("invalid_input", "fire_at: %s is no moment of the years 1 to %d in ISO 8601; write for example %q, "+
			"or with an offset such as +02:00, or with neither for UTC, or a date alone for its midnight",
			quote(text), lastYear, stamp(now.Add(time.Hour)))
	}
	return t, nil
}

// parseOffset reads what stands at the end of a time: Z, +02:00, +0200 or +02.
func parseOffset(s string) (time.Duration, bool) {
	t, ok := parseAny(s[1:], "15:04", "1504", "15")
	offset := time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute
	switch s[0] {
	case 'Z':
		return 0, s == "Z"
	case '-':
		return -offset, ok
	}
	return offset, ok
}

// parseAny reads a time in the first layout that fits.
func parseAny(s string, layouts ...string) (time.Time, bool) {
	for _, layout := range layouts {
		if t, err := time.Parse(layout, s); err == nil {
			return t, true
		}
	}
	return time.Time{}, false
}

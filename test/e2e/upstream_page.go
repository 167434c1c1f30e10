//go:build upstream

package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// leftOut matches the tests that this node cannot run: it has no SELinux; and the images of
// volume-data-source-validator and hello-populator, which one test deploys, cannot be made here,
// as the Go module proxy does not have these projects.
const leftOut = `\[FeatureGate:SELinuxMount|different SELinux context|with any volume data source`

// spec is a test of Kubernetes, as ginkgo reports it.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeText, State     string
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}
func (s spec) failed() bool { return s.State != "passed" && s.State != "skipped" }

// pattern is the kind of volume that it is run with.
func (s spec) pattern() string {
	if m := regexp.MustCompile(`^\[Testpattern: ([^\]]*)`).FindStringSubmatch(s.ContainerHierarchyTexts[1]); m != nil {
		return m[1]
	}
	return s.ContainerHierarchyTexts[1]
}

// suite is what it tests of that volume.
func (s spec) suite() string {
	name, _, _ := strings.Cut(regexp.MustCompile(`\[[^\]]*\] *`).ReplaceAllString(s.ContainerHierarchyTexts[1], ""), " ")
	return name
}

// upstreamPage is the page that tells what became of the tests, as `make e2e-upstream` writes it.
func upstreamPage(specs []spec) string {
	reasons := map[string]int{}
	var failures []string
	passed := 0
	for _, s := range specs {
		switch {
		case s.State == "passed":
			passed++
		case s.failed():
			failures = append(failures, s.name())
		case s.State == "skipped":
			reasons[s.reason()]++
		}
	}
	var page strings.Builder
	intro := fmt.Sprintf("Written by `make e2e-upstream`, which runs the suite [External Storage][suite] of Kubernetes %s on one node of it, "+
		"for the plugin as `make e2e` deploys it and its class `csi-node-local`. What the plugin can do is told to it in `test/e2e/testdriver.yaml`. "+
		"\"Default fs\" is ext4, or xfs where the plugin lacks CAP_SYS_RESOURCE.", kubernetesVersion)
	fmt.Fprintf(&page, "# The storage tests of Kubernetes\n\n%s\n\n[suite]: https://github.com/kubernetes/kubernetes/tree/%s/test/e2e/storage/external\n\n## What ran\n\n",
		wrap(intro, 120), kubernetesVersion)
	fmt.Fprintf(&page, "%d passed, %d failed, %d were skipped.\n\n", passed, len(failures), len(specs)-passed-len(failures))
	writeTable(&page, "volumes", specs, spec.pattern)
	writeTable(&page, "tests", specs, spec.suite)
	page.WriteString("## What failed\n\n")
	if len(failures) == 0 {
		page.WriteString("Nothing.\n")
	}
	slices.Sort(failures)
	for _, name := range failures {
		page.WriteString(item(name))
	}
	page.WriteString("\n## What was skipped\n\nBy the tests themselves, for the reason that they give:\n\n")
	for _, reason := range slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		return cmp.Or(reasons[b]-reasons[a], strings.Compare(a, b))
	}) {
		page.WriteString(item(fmt.Sprintf("%d: %s", reasons[reason], reason)))
	}
	page.WriteString(`
Not counted here are those that ` + "`make e2e-upstream`" + ` leaves out: tests of SELinux contexts, as its node has no
SELinux, and "should provision storage with any volume data source", which deploys images of other projects.
`)
	return page.String()
}

// writeTable counts tests by what key says of them. What was only skipped has no row.
func writeTable(page *strings.Builder, head string, specs []spec, key func(spec) string) {
	type row struct{ passed, failed, skipped int }
	rows := map[string]*row{}
	for _, s := range specs {
		r := rows[key(s)]
		if r == nil {
			r = &row{}
			rows[key(s)] = r
		}
		switch {
		case s.failed():
			r.failed++
		case s.State == "passed":
			r.passed++
		default:
			r.skipped++
		}
	}
	fmt.Fprintf(page, "| %s | passed | failed | skipped |\n| --- | --- | --- | --- |\n", head)
	var only []string
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		if r := rows[name]; r.passed+r.failed == 0 {
			only = append(only, strings.TrimSpace(name))
		} else {
			fmt.Fprintf(page, "| %s | %d | %d | %d |\n", name, r.passed, r.failed, r.skipped)
		}
	}
	if len(only) > 0 {
		fmt.Fprintf(page, "\n%s\n", wrap("Skipped as a whole: "+strings.Join(only, ", ")+".", 120))
	}
	page.WriteByte('\n')
}

// reason is why a test skipped itself, without who did.
func (s spec) reason() string {
	text := regexp.MustCompile(`,? -{0,2} ?skipping$`).ReplaceAllString(s.Failure.Message, "")
	text = regexp.MustCompile(`^(Driver|Suite) "?[^ "]+"? `).ReplaceAllString(text, "")
	return text
}

// item is a line of a list.
func item(text string) string {
	return "- " + strings.ReplaceAll(wrap(text, 118), "\n", "\n  ") + "\n"
}

// wrap breaks text into lines.
func wrap(text string, width int) string {
	var all strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case column == 0:
		case column+1+len(word) > width:
			all.WriteByte('\n')
			column = 0
		default:
			all.WriteByte(' ')
			column++
		}
		all.WriteString(word)
		column += len(word)
	}
	return all.String()
}

package state

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Whatever becomes of the file while the plugin runs, nothing is forgotten.
func TestFileLostWhileOpen(t *testing.T) {
	for name, harm := range map[string]func(path string) error{
		"deleted":      os.Remove,
		"with its dir": func(path string) error { return os.Rename(path, path+".moved") },
		"replaced": func(path string) error {
			return errorsOf(os.Remove(path), os.WriteFile(path, []byte("something else"), 0o600))
		},
		"emptied":      func(path string) error { return os.Truncate(path, 0) },
		"cut to 1":     func(path string) error { return os.Truncate(path, 1) },
		"cut to 4096":  func(path string) error { return os.Truncate(path, 4096) },
		"cut to 5000":  func(path string) error { return os.Truncate(path, 5000) },
		"cut to 16384": func(path string) error { return os.Truncate(path, 16384) },
	} {
		t.Run(name, func(t *testing.T) {
			path := storePath(t)
			s, err := Open(t.Context(), path, testBoot)
			if err != nil {
				t.Fatal(err)
			}
			for _, id := range []string{"a", "gone"} {
				if _, err := s.Edit(id, staged("/stage/"+id)); err != nil {
					t.Fatal(err)
				}
			}
			for range 2 {
				if err := harm(path); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Edit("b", staged("/stage/b")); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Edit("gone", emptied); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Edit("c", staged("/stage/c")); err != nil {
					t.Fatal(err)
				}
				if _, err := s.Edit("b", emptied); err != nil {
					t.Fatal(err)
				}
			}
			closeStore(t, s)
			again := openStore(t, path, testBoot)
			var ids []string
			for _, v := range again.List() {
				ids = append(ids, v.ID)
			}
			if strings.Join(ids, " ") != "a c" {
				t.Errorf("after it was opened again there are the records %q", ids)
			}
			if _, err := os.Lstat(path + freshSuffix); !os.IsNotExist(err) {
				t.Errorf("a half-made file is left: %v", err)
			}
		})
	}
}

func errorsOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Two plugins on one state directory: the one whose file was deleted does not
// take the other's.
func TestFileLostToAnother(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	if _, err := s.Edit("a", staged("/stage/a")); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other := openStore(t, path, testBoot)
	if _, err := other.Edit("x", staged("/stage/x")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Edit("b", staged("/stage/b")); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("edited: %v", err)
	}
	if s.Get("b") != nil || s.Get("a") == nil || other.Get("x") == nil {
		t.Error("records were mixed up")
	}
	if names, err := filepath.Glob(path + "*"); err != nil || len(names) != 1 {
		t.Errorf("left %q (%v)", names, err)
	}
}

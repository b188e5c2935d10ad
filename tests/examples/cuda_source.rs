use std::fs;

use super::{folder_with_text, run};

/// Every kernel compiles to CUDA C++ and to WGSL that is valid; in each type that kernels store.
#[test]
fn every_kernel_compiles_for_devices_that_are_not_here() {
    let folder = folder_with_text();
    let finished = run("cuda_source", folder.path(), &["--out", "sources", "--few"]).succeeded();
    for (language, dtypes) in [("cuda", &["f32", "f16", "bf16"][..]), ("wgsl", &["f32", "f16"])] {
        let files = fs::read_dir(folder.path().join("sources").join(language)).unwrap();
        let files: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        let kernels = ["pack_fwd", "prefix_fwd", "read_fwd", "close_fwd", "write_fwd", "write_bwd", "read_bwd"];
        let kernels = kernels.map(|kernel| format!("{kernel}_kernel"));
        let others = ["pack_site_kernel", "prefix_bwd_kernel_history", "prefix_bwd_kernel_query"].map(str::to_owned);
        for kernel in kernels.into_iter().chain(others) {
            for dtype in dtypes {
                let start = format!("{kernel}-{dtype}-");
                assert!(files.iter().any(|file| file.starts_with(&start)), "no {start}: {finished:#?}");
            }
        }
        assert!(finished.stdout.contains(&format!("{} sources in sources/{language}", files.len())), "{finished:#?}");
    }
}

#[test]
fn a_folder_is_needed() {
    let folder = folder_with_text();
    run("cuda_source", folder.path(), &[]).refused(2, &["--out"]);
    run("cuda_source", folder.path(), &["--out", "text.txt"]).refused(1, &["text.txt"]);
}
